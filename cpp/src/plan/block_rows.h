// Block rows of a pattern, how the builders of plans group them, and the columns of a group.
#pragma once

#include <cstdint>
#include <vector>

#include "common/problem.h"

namespace ts {

// A pattern seen from the features that are grouped into macro-tiles.
struct View {
    Adjacency rows;
    int64_t row_count;  // of all weights
    int64_t col_count;  // of one
    int32_t row_block;  // features
    int32_t col_block;  // k
    int32_t weights;    // below each other, see Pattern::groups

    int32_t length(int32_t row) const { return rows.ptr[row + 1] - rows.ptr[row]; }
    int64_t weight_rows() const { return row_count / weights; }
};

View view_of(const Pattern& pattern, Op op);

using Group = std::vector<int32_t>;

// Both group the rows of each weight by themselves, one weight after the other.
//
// Greedy: the longest row left takes the rows most alike it. Rows of one group share the loads of
// the columns they have in common, and similar lengths keep the warps of a tile equally busy.
std::vector<Group> group_alike(const View& view, int32_t size);

// Groups of a power of two: rows are paired by the columns they share, pairs are paired again, and so on.
// Neighbours in a group have most in common, as do its halves.
std::vector<Group> pair_rows(const View& view, int32_t size);

// Two groups that may become a pair. Their list is what takes most memory.
struct Candidate {
    int32_t overlap;
    int32_t first, second;  // groups
};

// The blocks of one column of a macro-tile: a slot for each row of the group, or -1.
struct Column {
    int32_t col;
    std::vector<int32_t> slots;
};

std::vector<Column> columns_of(const View& view, const Group& group, int32_t size);

}  // namespace ts
