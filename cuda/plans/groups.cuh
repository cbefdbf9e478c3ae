// Groups of block rows that have many columns in common: sets are paired, pairs are paired again, and so on.
//
// Every set names the free one it fits best, and two that name each other are a pair; the others try again
// among themselves. No two pairs of a set are equally good, so this finds what a greedy choice of the best
// pair of all would find, in about log n rounds. What is left then is paired in order. Sets of different
// weights are never paired: each weight has equally many, one after another, and so have their pairs.
#pragma once

#include <algorithm>

#include "plans/sets.cuh"

namespace ts::plans {

struct Fit {
    float density;  // of the elements in sets
    float uneven;   // what a difference of one element costs

    // Elements in common. Long sets have many with all others: what is usual for a length is taken off,
    // which changes no sum over pairs of all sets but lets them agree sooner.
    __device__ uint32_t operator()(int common, int count, int other) const {
        const float value = static_cast<float>(common) - density * static_cast<float>(count + other) -
                            uneven * static_cast<float>(abs(count - other));
        const uint32_t bits = __float_as_uint(value);
        return bits >> 31 ? ~bits : bits | 1u << 31;  // ordered like the values
    }
};

__device__ inline bool is_paired(const int* named, int set) {
    const int other = named[set];
    return other >= 0 && named[other] == set;
}

// How well two sets fit, as a number that says which is the other. Of equally good ones a set takes the one
// with the nearest number: neighbours of an ordered pattern.
__device__ inline uint64_t offer(const Sets& sets, const int* counts, const Fit& fit, int own, int other) {
    int common = 0;
    for (int w = 0; w < sets.width; ++w) common += __popc(sets.word(own, w) & sets.word(other, w));
    const uint64_t value = uint64_t{fit(common, counts[own], counts[other])} << 32;
    return value | ~static_cast<uint32_t>(own ^ other);
}

// The set that made the best of the offers of a warp's lanes (0: no offer), or -1.
__device__ inline int best_of(uint64_t best, int own) {
    for (int distance = 16; distance > 0; distance /= 2)
        best = max(best, __shfl_xor_sync(~0u, best, distance));
    return best == 0 ? -1 : own ^ static_cast<int>(~static_cast<uint32_t>(best));
}

constexpr int kMatchWarps = 8;

// One round. One warp for each set; `size`: sets of a weight, whose blocks come one after another.
static __global__ void __launch_bounds__(32 * kMatchWarps)
    name_partners(Sets sets, int size, const int* __restrict__ counts, Fit fit,
                  const int* __restrict__ before, int* __restrict__ after) {
    constexpr int kChunk = 1024;
    __shared__ int free_sets[kChunk];
    __shared__ int free_count;
    const int blocks = (size + kMatchWarps - 1) / kMatchWarps, begin = blockIdx.x / blocks * size;
    const int end = begin + size, lane = threadIdx.x % 32;
    const int own = begin + blockIdx.x % blocks * kMatchWarps + threadIdx.x / 32;
    const bool searches = own < end && !is_paired(before, own);
    if (own < end && !searches && lane == 0) after[own] = before[own];
    if (!__syncthreads_or(searches)) return;
    uint64_t best = 0;
    for (int first = begin; first < end; first += kChunk) {
        if (threadIdx.x == 0) free_count = 0;
        __syncthreads();
        for (int i = first + threadIdx.x; i < min(first + kChunk, end); i += blockDim.x)
            if (!is_paired(before, i)) free_sets[atomicAdd(&free_count, 1)] = i;
        __syncthreads();
        for (int i = lane; searches && i < free_count; i += 32) {
            const int other = free_sets[i];
            if (other != own) best = max(best, offer(sets, counts, fit, own, other));
        }
        __syncthreads();
    }
    const int partner = best_of(best, own);
    if (searches && lane == 0) after[own] = partner;
}

// True if one thread block compares sets of a weight sooner than the rounds can be launched: it reads all
// words of each pair.
constexpr int kFewSets = 256;
inline bool are_few(int size, const Sets& sets) {
    constexpr int64_t kFewWords = 1 << 18;
    return size <= kFewSets && int64_t{size} * size * sets.width <= kFewWords;
}

// All rounds of few sets. One block for each weight, which has `size` of them.
static __global__ void __launch_bounds__(1024)
    name_partners_of_few(Sets sets, int size, const int* __restrict__ counts, Fit fit, int rounds,
                         int* named) {
    __shared__ int places[2][kFewSets];
    const int lane = threadIdx.x % 32, begin = blockIdx.x * size;
    int *before = places[0], *after = places[1];
    for (int i = threadIdx.x; i < size; i += blockDim.x) before[i] = -1;
    __syncthreads();
    for (int round = 0; round < rounds; ++round) {
        bool searches = false;
        for (int own = threadIdx.x / 32; own < size; own += blockDim.x / 32) {
            int partner = before[own];
            if (!is_paired(before, own)) {
                searches = true;
                uint64_t best = 0;
                for (int i = lane; i < size; i += 32)
                    if (i != own && !is_paired(before, i))
                        best = max(best, offer(sets, counts, fit, begin + own, begin + i));
                const int found = best_of(best, begin + own);
                partner = found < 0 ? -1 : found - begin;
            }
            if (lane == 0) after[own] = partner;
        }
        const bool goes_on = __syncthreads_or(searches);
        int* const read = before;
        before = after;
        after = read;
        if (!goes_on) break;
    }
    for (int i = threadIdx.x; i < size; i += blockDim.x)
        named[begin + i] = before[i] < 0 ? -1 : begin + before[i];
}

// pairs: first and second set of each, the second -1 where there is none. One block for each weight, which
// has `size` sets.
static __global__ void __launch_bounds__(1024) list_pairs(int* named, int size, int* left_over, int2* pairs) {
    const int begin = blockIdx.x * size, end = begin + size;
    left_over += begin;
    pairs += blockIdx.x * ((size + 1) / 2);
    int before = 0;
    for (int first = begin; first < end; first += blockDim.x) {
        const int i = first + threadIdx.x;
        const bool alone = i < end && !is_paired(named, i);
        const int2 sums = block_scan(alone);
        if (alone) left_over[before + sums.x] = i;
        before += sums.y;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < before; i += blockDim.x)
        named[left_over[i]] = (i ^ 1) < before ? left_over[i ^ 1] : -1;
    __syncthreads();
    before = 0;
    for (int first = begin; first < end; first += blockDim.x) {
        const int i = first + threadIdx.x, partner = i < end ? named[i] : 0;
        const bool leads = i < end && (partner < 0 || partner > i);
        const int2 sums = block_scan(leads);
        if (leads) pairs[before + sums.x] = make_int2(i, partner);
        before += sums.y;
    }
}

// The columns of pairs and their block rows. One thread for each pair; rows is null where sets are rows, of
// which otherwise each has `size`.
static __global__ void join_pairs(const int2* pairs, Sets sets, const int* rows, int size, Sets joined,
                                  int* joined_counts, int* joined_rows) {
    const int pair = blockIdx.x * blockDim.x + threadIdx.x;
    if (pair >= joined.count) return;
    const int2 both = pairs[pair];
    int count = 0;
    for (int w = 0; w < sets.width; ++w) {
        const uint32_t bits = sets.word(both.x, w) | (both.y < 0 ? 0 : sets.word(both.y, w));
        joined.word(pair, w) = bits;
        count += __popc(bits);
    }
    joined_counts[pair] = count;
    for (int i = 0; i < 2 * size; ++i) {
        const int set = i < size ? both.x : both.y;
        joined_rows[pair * 2 * size + i] = set < 0 ? -1 : rows == nullptr ? set : rows[set * size + i % size];
    }
}

// Block rows in groups of one size, a power of two; those of one weight after those of another.
struct Groups {
    int size;
    Sets sets;    // columns of a group
    int* counts;  // how many
    int* rows;    // [groups][size] block rows, -1 where there is none; null where groups are single rows
};

// The groups, and what they were joined from last.
class Grouping {
  public:
    // With `halves`, those of a group should be equally long rather than alike.
    Grouping(Arena& arena, const View& view, int size, bool halves) : view_(view), halves_(halves) {
        for (int i = 0, each = view.weight_rows(); i < 2; ++i, each = (each + 1) / 2) {
            const int count = each * view.weights;
            buffers_[i].sets = {nullptr, count, (view.cols + 31) / 32};
            buffers_[i].sets.words = arena.take<uint32_t>(buffers_[i].sets.size());
            buffers_[i].counts = arena.take<int>(count);
            buffers_[i].rows = arena.take<int>(view.rows + size * view.weights);
            named_[i] = arena.take<int>(view.rows);
        }
        left_over_ = arena.take<int>(view.rows);
        pairs_ = arena.take<int2>((view.weight_rows() + 1) / 2 * view.weights);
        size_ = size;
    }

    // Groups of all weights, which have equally many.
    static int group_count(const View& view, int size) {
        return (view.weight_rows() + size - 1) / size * view.weights;
    }

    void build(Stream& stream) {
        groups_ = buffers_[0];
        groups_.size = 1;
        groups_.rows = nullptr;
        launch(fill_sets, groups_.sets.size(), 256, stream, view_, groups_.sets, Elements{});
        launch(count_elements, groups_.sets.count, 128, stream, groups_.sets, groups_.counts);
        double absent = 1 - static_cast<double>(view_.nnz) / std::max(1.0, double(view_.rows) * view_.cols);
        for (; groups_.size < size_; absent *= absent) pair_up(static_cast<float>(1 - absent), stream);
    }

    const Groups& groups() const { return groups_; }
    const Groups& halves() const { return before_; }
    const int2* pairs() const { return pairs_; }

  private:
    void pair_up(float density, Stream& stream) {
        const int64_t weights = view_.weights;
        const int count = groups_.sets.count, size = count / view_.weights;
        // With an odd number of groups one stays alone, best the one with the fewest block rows.
        const bool even = (halves_ && 2 * groups_.size == size_) || (!halves_ && size % 2 == 1);
        const Fit fit{density, even ? 0.5f : 0.0f};
        int rounds = 4;
        for (int n = size; n > 1; n = (n + 1) / 2) rounds += 2;
        int* const named = named_[rounds % 2];
        if (are_few(size, groups_.sets)) {
            launch(name_partners_of_few, 1024 * weights, 1024, stream, groups_.sets, size, groups_.counts,
                   fit, rounds, named);
        } else {
            fill(named_[0], 0xff, count * sizeof(int), stream);
            const int64_t blocks = weights * ((size + kMatchWarps - 1) / kMatchWarps);
            for (int round = 0; round < rounds; ++round)
                launch(name_partners, 32 * kMatchWarps * blocks, 32 * kMatchWarps, stream, groups_.sets, size,
                       groups_.counts, fit, named_[round % 2], named_[(round + 1) % 2]);
        }
        launch(list_pairs, 1024 * weights, 1024, stream, named, size, left_over_, pairs_);
        before_ = groups_;
        Groups& to = buffers_[groups_.sets.words == buffers_[0].sets.words ? 1 : 0];
        const int pairs = (size + 1) / 2 * view_.weights;
        groups_ = {2 * before_.size, {to.sets.words, pairs, before_.sets.width}, to.counts, to.rows};
        launch(join_pairs, groups_.sets.count, 64, stream, pairs_, before_.sets, before_.rows, before_.size,
               groups_.sets, groups_.counts, groups_.rows);
    }

    View view_;
    int size_;
    bool halves_;
    Groups buffers_[2];
    Groups groups_, before_;
    int* named_[2];
    int* left_over_;
    int2* pairs_;
};

}  // namespace ts::plans
