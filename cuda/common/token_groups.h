// Ranges of the groups of tokens of a grouped product, for kernels, which alone read the offsets. These may
// be anything: no group reaches out of 0 to `tokens`, and no tile out of its group.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/problem.h"

namespace ts {

struct TokenSpan {
    int first, last;

    constexpr int tiles(int tile_tokens) const { return (last - first + tile_tokens - 1) / tile_tokens; }
};

struct TokenGroups {
    const int32_t* offsets;  // [count + 1], see ts_matmul_desc
    int count;
    int tokens;  // of all

    constexpr TokenSpan span(int group) const {
        const int first = inside(offsets[group]);
        return {first, std::max(first, inside(offsets[group + 1]))};
    }

  private:
    constexpr int inside(int offset) const { return std::min(std::max(offset, 0), tokens); }
};

// Upper bound of the tiles of all groups, as far as is known without the offsets: each group with tokens
// has one that it does not fill.
constexpr int64_t most_token_tiles(int64_t tokens, int64_t groups, int tile_tokens) {
    return tokens / tile_tokens + std::min(tokens, groups);
}

// The host's knowledge of groups: at most how many have tokens, and how many tokens these have in the mean.
constexpr int64_t busy_groups(const Problem& problem) {
    return std::clamp<int64_t>(problem.tokens, 1, problem.pattern.groups);
}
constexpr int64_t tokens_of_group(const Problem& problem) {
    return (problem.tokens + busy_groups(problem) - 1) / busy_groups(problem);
}

// Counts tiles of tokens, group by group. Broken offsets may have a token in many groups: the count ends at
// `most`, which offsets in order do not exceed.
struct TileCount {
    TokenGroups groups;
    int tile_tokens;
    int most;

    // The tiles of the groups from `first` to `last` - 1 and of those before, which are told. If it is not
    // null, tiles_before[group + 1] gets them up to that group's.
    constexpr int add(int before, int first, int last, int* tiles_before) const {
        for (int group = first; group < last; ++group) {
            before = std::min(before + groups.span(group).tiles(tile_tokens), most);
            if (tiles_before != nullptr) tiles_before[group + 1] = before;
        }
        return before;
    }
};

// The group that has a tile, of groups whose tiles begin at tiles_before[group], in order.
constexpr int group_of_tile(const int* tiles_before, int groups, int tile) {
    int group = 0;
    for (int end = groups; end - group > 1;) {
        const int middle = (group + end) / 2;
        (tiles_before[middle] <= tile ? group : end) = middle;
    }
    return group;
}

}  // namespace ts
