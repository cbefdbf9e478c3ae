// Which tiles and tokens a CTA of an sdd kernel sums up. CTAs stay on their multiprocessors, alone or in
// teams (clusters) that compute as many tiles, one after another in the plan, at the same time.
//
// All walk the tokens at the same pace, so that what one reads from memory the others find in L2. Tiles are
// dealt out in rounds of one for each CTA. Those of the last, partial round are cut into parts, at the same
// tokens in every tile: into equal ones, or into some as long as a team's even share of all steps. Then what
// is left over of the tiles goes to the teams that are left over, end to end, cut again where a share ends. A
// second kernel adds the partial sums. Tiles are not cut where that kernel would take longer than can be won.
//
// Kernels use it, and estimates of their time.
#pragma once

#include <algorithm>

namespace ts {

constexpr int kSddStep = 64;  // tokens

// How tiles are shared out. Counts of tiles are those of a team.
struct SddShares {
    int steps;  // of a tile
    int whole;  // that are surely not split, the first ones
    int rest;   // all others
    int share;  // steps of a team's share of these
    int parts;  // of a tile that are a share each
    int left;   // steps of a tile that are left over
    int saved;  // time that splitting saves

    // `step_time`: of a step, in units of a step of 128 x 256 in 16 bits by wgmma, which takes .58 us on an
    // H200. `may_split`: whether there is memory for partial sums and a second kernel.
    constexpr SddShares(int tiles, int steps, int teams, int team_size, int step_time, bool may_split)
        : steps(steps), whole(0), rest(0), share(steps), parts(1), left(0), saved(0) {
        const int team_tiles = (tiles + team_size - 1) / team_size;
        whole = may_split ? team_tiles / teams * teams : team_tiles;
        rest = team_tiles - whole;
        if (rest > 0) divide(teams, team_size, step_time);
    }

    constexpr bool is_split() const { return share < steps; }

    // Tiles of partial sums, at most.
    constexpr int partials(int teams) const { return left > 0 ? teams + rest : parts * rest; }

    // Steps in the time of which partial sums are stored.
    static constexpr int storing(int step_time) { return (2 + step_time) / step_time; }

  private:
    // Chooses the least of the estimated times. Fitted on an H200.
    constexpr void divide(int teams, int team_size, int step_time) {
        const int least = (3 + step_time) / step_time;
        const int even_share = (rest * (steps + storing(step_time)) + teams - 1) / teams;
        const int uneven = even_share < least ? least : even_share;
        if (uneven >= steps) return;
        const int count = steps / uneven, over = steps - count * uneven;
        // A few parts may be one more where teams are idle; to add many takes as long as is saved.
        const int most = count < 4 && rest * (count + 1) <= teams ? count + 1 : count;
        const int even = (steps + most - 1) / most, even_parts = (steps + even - 1) / even;
        const int even_time = even == steps ? step_time * steps
                                            : step_time * even + reduction_time(rest * even_parts, team_size);
        // Leftover work begins at any token and finds less in L2.
        const int misses = 4 + 2 * over * rest / (3 * teams);
        const int uneven_time = step_time * uneven + reduction_time(teams + rest, team_size) + misses;
        const bool is_even = even_time <= uneven_time || over == 0;
        const int gain = step_time * steps - (is_even ? even_time : uneven_time);
        if (gain <= 0) return;
        saved = gain;
        share = is_even ? even : uneven;
        parts = is_even ? even_parts : count;
        left = is_even ? 0 : over;
    }

    static constexpr int reduction_time(int partials, int team_size) { return 5 + partials * team_size / 16; }
};

struct SddWork {
    int tile;
    int first_step;  // 64 tokens each
    int last_step;
    int partial;  // where its partial sums go, -1 if it is not split
    bool exists;  // false: nobody needs the sums
};

// Positions of the partial sums of a tile, in order.
struct SddPartials {
    int first;  // of the parts that are a share each, and how far apart they are
    int distance;
    int parts;
    int left;  // of what was left over, in one or two parts
    int second_left;
    int left_parts;

    constexpr int count() const { return parts + left_parts; }
    constexpr int at(int number) const {
        if (number < parts) return first + number * distance;
        return number == parts ? left : second_left;
    }
};

// `kStepTime`: see SddShares.
template <int kStepTime>
class SddSchedule : SddShares {
  public:
    constexpr SddSchedule(int tiles, int steps, int teams, int team_size, bool may_split)
        : SddShares(tiles, steps, teams, team_size, kStepTime, may_split),
          tiles_(tiles),
          teams_(teams),
          team_size_(team_size) {}

    // Whole tiles and then parts are numbered, so that a team's are a number of teams apart. Some are empty.
    constexpr int size() const {
        const int most = left > 0 ? share / place_size() + 2 : 1;
        return whole + (is_split() ? most * teams_ : rest);
    }
    // True if all teams have a tile in this one's round, and none is split.
    constexpr bool is_whole(int index) const {
        return index < whole && (index / teams_ + 1) * teams_ * team_size_ <= tiles_;
    }

    // For one CTA of the team.
    constexpr SddWork work(int index, int rank) const {
        const Part part = part_at(index);
        const int tile = part.team_tile * team_size_ + rank;
        return {std::min(tile, tiles_ - 1), part.first_step, part.last_step,
                part.partial < 0 ? -1 : part.partial * team_size_ + rank, part.exists && tile < tiles_};
    }

    // Tiles that have partial sums.
    constexpr int split_tiles() const { return is_split() ? tiles_ - first_split() : 0; }
    constexpr int first_split() const { return whole * team_size_; }
    constexpr SddPartials partials(int split_tile) const {
        const int place = split_tile / team_size_, rank = split_tile % team_size_;
        const int first = first_share(place);
        return {place * team_size_ + rank,
                rest * team_size_,
                parts,
                partial_left(place, first) * team_size_ + rank,
                partial_left(place, first + 1) * team_size_ + rank,
                left > 0 ? 1 + last_share(place) - first : 0};
    }

  private:
    // Part of a team's tile: as many tiles, one after another in the plan, as it has CTAs.
    struct Part {
        int team_tile;
        int first_step;
        int last_step;
        int partial;
        bool exists;
    };
    static constexpr Part kNothing = {0, 0, 0, -1, false};
    static constexpr int kStoring = storing(kStepTime);

    constexpr Part part_at(int index) const {
        if (index < whole || !is_split()) return {index, 0, steps, -1, true};
        const int team = (index - whole) % teams_, turn = (index - whole) / teams_;
        if (team >= rest * parts) return left_part(team - rest * parts, turn);
        if (turn > 0) return kNothing;
        const int first = team / rest * share;
        return {whole + team % rest, first, std::min(first + share, steps), team, true};
    }

    // Leftover tiles have a place in the line of work that the teams share.
    constexpr int place_size() const { return left + kStoring; }
    constexpr int first_share(int place) const { return place * place_size() / share; }
    constexpr int last_share(int place) const { return (place * place_size() + left - 1) / share; }

    constexpr Part left_part(int number, int turn) const {
        if (left == 0) return kNothing;
        const int place = number * share / place_size() + turn;
        const int at = place * place_size();
        const int first = std::max(number * share - at, 0), last = std::min((number + 1) * share - at, left);
        if (place >= rest || first >= last) return kNothing;
        const int before = parts * share;
        return {whole + place, before + first, before + last, partial_left(place, number), true};
    }

    // At most one in a share began in the share before.
    constexpr int partial_left(int place, int number) const {
        const int first = rest * parts;
        return number == first_share(place) ? first + place : first + rest + number;
    }

    int tiles_;
    int teams_;
    int team_size_;
};

}  // namespace ts
