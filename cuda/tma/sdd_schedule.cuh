// Which tiles and tokens a CTA of an sdd kernel sums up. CTAs stay on their multiprocessors, alone or in
// teams (clusters) that compute as many tiles, one after another in the plan, at the same time.
//
// All walk the tokens at the same pace, so that what one reads from memory the others find in L2. Tiles are
// dealt out in rounds of one for each CTA. Those of the last, partial round are shared by all: each tile is
// cut into parts as long as a team's share, at the same tokens in every tile. What is left over of the tiles
// goes to the teams that are left over, end to end, cut again where a share ends. A second kernel adds the
// partial sums. Tiles are not cut where that kernel would take longer than can be won.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/problem.h"
#include "tma/pace.cuh"

namespace ts::tma {

constexpr int kSddStep = 64;  // tokens

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

class SddSchedule {
  public:
    // `may_split`: whether there is memory for partial sums and a second kernel.
    __host__ __device__ SddSchedule(int tiles, int steps, int teams, int team_size, bool may_split)
        : tiles_(tiles), steps_(steps), teams_(teams), team_size_(team_size) {
        const int team_tiles = (tiles + team_size - 1) / team_size;
        whole_ = may_split ? team_tiles / teams * teams : team_tiles;
        rest_ = team_tiles - whole_;
        share_ = steps;
        parts_ = 1;
        left_ = 0;
        if (rest_ > 0) divide();
    }

    __host__ __device__ bool is_split() const { return share_ < steps_; }

    // Whole tiles and then parts are numbered, so that a team's are a number of teams apart. Some are empty.
    __device__ int size() const {
        const int most = left_ > 0 ? share_ / place_size() + 2 : 1;
        return whole_ + (rest_ > 0 ? most * teams_ : 0);
    }
    __device__ bool is_whole(int index) const { return index < whole_; }

    // For one CTA of the team.
    __device__ SddWork work(int index, int rank) const {
        const Part part = part_at(index);
        const int tile = part.team_tile * team_size_ + rank;
        return {min(tile, tiles_ - 1), part.first_step, part.last_step,
                part.partial < 0 ? -1 : part.partial * team_size_ + rank, part.exists && tile < tiles_};
    }

    // Tiles that have partial sums.
    __device__ int split_tiles() const { return is_split() ? tiles_ - first_split() : 0; }
    __device__ int first_split() const { return whole_ * team_size_; }
    __device__ SddPartials partials(int split_tile) const {
        const int place = split_tile / team_size_, rank = split_tile % team_size_;
        const int share = first_share(place);
        return {place * team_size_ + rank,
                rest_ * team_size_,
                parts_,
                partial_left(place, share) * team_size_ + rank,
                partial_left(place, share + 1) * team_size_ + rank,
                left_ > 0 ? 1 + last_share(place) - share : 0};
    }

    // Upper bound of the tiles whose partial sums are stored.
    static int max_partials(int ctas) { return 2 * ctas; }

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
    static constexpr int kMinSteps = 4;  // of a share
    static constexpr int kStoring = 3;   // steps in the time of which sums are stored

    __device__ Part part_at(int index) const {
        if (index < whole_) return {index, 0, steps_, -1, true};
        const int team = (index - whole_) % teams_, turn = (index - whole_) / teams_;
        if (team >= rest_ * parts_) return left_part(team - rest_ * parts_, turn);
        if (turn > 0) return kNothing;
        const int first = team / rest_ * share_;
        return {whole_ + team % rest_, first, min(first + share_, steps_), is_split() ? team : -1, true};
    }

    // Chooses the least of the estimated times, in steps. Fitted on an H200.
    __host__ __device__ void divide() {
        const int even_share = (rest_ * (steps_ + kStoring) + teams_ - 1) / teams_;
        const int share = even_share < kMinSteps ? kMinSteps : even_share;
        if (share >= steps_) return;
        const int parts = steps_ / share, left = steps_ - parts * share;
        const int even = (steps_ + parts - 1) / parts;
        const int even_time = parts == 1 ? steps_ : even + reduction_time(rest_ * parts);
        // Leftover work begins at any token and finds less in L2.
        const int misses = 4 + 2 * left * rest_ / (3 * teams_);
        const int uneven_time = share + reduction_time(teams_ + rest_) + misses;
        const bool is_even = even_time <= uneven_time || left == 0;
        if ((is_even ? even_time : uneven_time) >= steps_) return;
        if (is_even) {
            share_ = even;
            parts_ = (steps_ + even - 1) / even;
        } else {
            share_ = share;
            parts_ = parts;
            left_ = left;
        }
    }

    __host__ __device__ int reduction_time(int partials) const { return 5 + partials * team_size_ / 16; }

    // Leftover tiles have a place in the line of work that the teams share.
    __device__ int place_size() const { return left_ + kStoring; }
    __device__ int first_share(int place) const { return place * place_size() / share_; }
    __device__ int last_share(int place) const { return (place * place_size() + left_ - 1) / share_; }

    __device__ Part left_part(int share, int turn) const {
        if (left_ == 0) return kNothing;
        const int place = share * share_ / place_size() + turn;
        const int at = place * place_size();
        const int first = max(share * share_ - at, 0), last = min((share + 1) * share_ - at, left_);
        if (place >= rest_ || first >= last) return kNothing;
        const int before = parts_ * share_;
        return {whole_ + place, before + first, before + last, partial_left(place, share), true};
    }

    // At most one in a share began in the share before.
    __device__ int partial_left(int place, int share) const {
        const int first = rest_ * parts_;
        return share == first_share(place) ? first + place : first + rest_ + share;
    }

    int tiles_;
    int steps_;
    int teams_;
    int team_size_;
    // In teams' tiles:
    int whole_;  // that are not split, the first ones
    int rest_;   // all others
    int share_;  // steps of a team's share of these
    int parts_;  // of a tile that are a share each
    int left_;   // steps of a tile that are left over
};

// --- Host side ---

constexpr int kMinSplitSteps = 24;  // below this, finding nothing to do takes longer than can be won

inline int sdd_steps(const Problem& problem) {
    return static_cast<int>((problem.tokens + kSddStep - 1) / kSddStep);
}

// True if the products of SddSchedule fit into 32 bits: steps of all teams, twice.
inline bool sdd_fits(const Problem& problem, const Device& device) {
    return 2 * (int64_t{sdd_steps(problem)} + 8) * device.multiprocessors <= INT32_MAX;
}

// True if each multiprocessor gets a tile of that many values at most, and some get more.
inline bool fills(const Problem& problem, const Device& device, int64_t tile_values) {
    return problem.pattern.value_count() > device.multiprocessors * tile_values;
}

// The workspace of a kernel that may split tiles: the counters of the pace, and behind them the
// partial sums of tiles.
constexpr size_t kPaceBytes = Pace::kBytes;

inline size_t split_bytes(const Device& device, int64_t tile_values) {
    return kPaceBytes + SddSchedule::max_partials(device.multiprocessors) * sizeof(float) * tile_values;
}

template <class Arguments>
cudaError_t use_split_memory(Arguments& arguments, void* workspace, bool is_paced, void* stream) {
    arguments.partial = reinterpret_cast<float4*>(static_cast<char*>(workspace) + kPaceBytes);
    if (!is_paced) return cudaSuccess;
    arguments.pace = static_cast<int*>(workspace);
    return cudaMemsetAsync(workspace, 0, kPaceBytes, static_cast<cudaStream_t>(stream));
}

}  // namespace ts::tma
