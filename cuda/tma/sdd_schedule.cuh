// Which tiles and tokens a CTA of an sdd kernel sums up. CTAs stay on their multiprocessors, alone or in
// teams (clusters) that compute as many tiles, one after another in the plan, at the same time.
//
// All walk the tokens at the same pace, so that what one reads from memory the others find in L2. Tiles are
// dealt out in rounds of one for each CTA. Those of the last, partial round are cut into parts, at the same
// tokens in every tile: into equal ones, or into some as long as a team's even share of all steps. Then what
// is left over of the tiles goes to the teams that are left over, end to end, cut again where a share ends. A
// second kernel adds the partial sums. Tiles are not cut where that kernel would take longer than can be won.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/problem.h"
#include "common/sdd_shares.h"
#include "tma/pace.cuh"

namespace ts::tma {

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

    __device__ int count() const { return parts + left_parts; }
    __device__ int at(int number) const {
        if (number < parts) return first + number * distance;
        return number == parts ? left : second_left;
    }
};

// `kStepTime`: see SddShares.
template <int kStepTime>
class SddSchedule : SddShares {
  public:
    __device__ SddSchedule(int tiles, int steps, int teams, int team_size, bool may_split)
        : SddShares(tiles, steps, teams, team_size, kStepTime, may_split),
          tiles_(tiles),
          steps_(steps),
          teams_(teams),
          team_size_(team_size) {}

    // Whole tiles and then parts are numbered, so that a team's are a number of teams apart. Some are empty.
    __device__ int size() const {
        const int most = left > 0 ? share / place_size() + 2 : 1;
        return whole + (is_split(steps_) ? most * teams_ : rest);
    }
    // True if all teams have a tile in this one's round, and none is split.
    __device__ bool is_whole(int index) const {
        return index < whole && (index / teams_ + 1) * teams_ * team_size_ <= tiles_;
    }

    // For one CTA of the team.
    __device__ SddWork work(int index, int rank) const {
        const Part part = part_at(index);
        const int tile = part.team_tile * team_size_ + rank;
        return {min(tile, tiles_ - 1), part.first_step, part.last_step,
                part.partial < 0 ? -1 : part.partial * team_size_ + rank, part.exists && tile < tiles_};
    }

    // Tiles that have partial sums.
    __device__ int split_tiles() const { return is_split(steps_) ? tiles_ - first_split() : 0; }
    __device__ int first_split() const { return whole * team_size_; }
    __device__ SddPartials partials(int split_tile) const {
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

    __device__ Part part_at(int index) const {
        if (index < whole || !is_split(steps_)) return {index, 0, steps_, -1, true};
        const int team = (index - whole) % teams_, turn = (index - whole) / teams_;
        if (team >= rest * parts) return left_part(team - rest * parts, turn);
        if (turn > 0) return kNothing;
        const int first = team / rest * share;
        return {whole + team % rest, first, min(first + share, steps_), team, true};
    }

    // Leftover tiles have a place in the line of work that the teams share.
    __device__ int place_size() const { return left + kStoring; }
    __device__ int first_share(int place) const { return place * place_size() / share; }
    __device__ int last_share(int place) const { return (place * place_size() + left - 1) / share; }

    __device__ Part left_part(int number, int turn) const {
        if (left == 0) return kNothing;
        const int place = number * share / place_size() + turn;
        const int at = place * place_size();
        const int first = max(number * share - at, 0), last = min((number + 1) * share - at, left);
        if (place >= rest || first >= last) return kNothing;
        const int before = parts * share;
        return {whole + place, before + first, before + last, partial_left(place, number), true};
    }

    // At most one in a share began in the share before.
    __device__ int partial_left(int place, int number) const {
        const int first = rest * parts;
        return number == first_share(place) ? first + place : first + rest + number;
    }

    int tiles_;
    int steps_;
    int teams_;
    int team_size_;
};

// --- Host side ---

inline int sdd_steps(const Problem& problem) {
    return static_cast<int>((problem.tokens + kSddStep - 1) / kSddStep);
}

// True if the products of SddSchedule fit into 32 bits: steps of all teams, twice.
inline bool sdd_fits(const Problem& problem, const Device& device) {
    return 2 * (int64_t{sdd_steps(problem)} + 8) * device.multiprocessors <= INT32_MAX;
}

constexpr int kMinPacedSteps = 32;  // fewer take less time than the counters need to be cleared
constexpr double kMostTiles = 1.1;  // times those of a random pattern, of others as a rule

// How many tiles are split at most, 0 if a second kernel is not worth its launch. The number of tiles, which
// is on the device, is taken to be between these two, any as likely as the others.
inline int most_split(double fewest, double most, int steps, int teams, int team_size, int step_time) {
    constexpr int kProbes = 16;
    constexpr int kNothing = 9;  // time to launch a kernel that finds nothing to do, see SddShares
    const int first = std::max(1, static_cast<int>(std::ceil(fewest)));
    const int last = std::max(first, static_cast<int>(std::ceil(most)));
    // After a round of tiles all is as before.
    const int probed = std::min(last - first + 1, teams * team_size);
    int64_t saved = 0;
    for (int tiles = first; tiles < first + probed; tiles += 1 + (probed - 1) / kProbes) {
        const SddShares shares(tiles, steps, teams, team_size, step_time, true);
        saved += shares.is_split(steps) ? shares.saved : -kNothing;
    }
    return saved > 0 ? std::min(last, teams * team_size) : 0;
}

// True if each multiprocessor gets a tile of that many values at most, and some get more.
inline bool fills(const Problem& problem, const Device& device, int64_t tile_values) {
    return problem.pattern.value_count() > device.multiprocessors * tile_values;
}

// The workspace of a kernel: the counters of the pace, and behind them the partial sums of tiles.
constexpr size_t kPaceBytes = Pace::kBytes;

inline size_t sdd_bytes(bool is_paced, bool may_split, const Device& device, int64_t tile_values) {
    const size_t most = may_split ? 2 * static_cast<size_t>(device.multiprocessors) : 0;  // partial sums
    return is_paced || may_split ? kPaceBytes + most * sizeof(float) * tile_values : 0;
}

template <class Arguments>
cudaError_t use_memory(Arguments& arguments, void* workspace, bool is_paced, void* stream) {
    if (arguments.most_split > 0)
        arguments.partial = reinterpret_cast<float4*>(static_cast<char*>(workspace) + kPaceBytes);
    if (!is_paced) return cudaSuccess;
    arguments.pace = static_cast<int*>(workspace);
    return cudaMemsetAsync(workspace, 0, kPaceBytes, static_cast<cudaStream_t>(stream));
}

}  // namespace ts::tma
