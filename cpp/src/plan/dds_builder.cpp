// Plans of dds.
#include "plan/builders.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "plan/host_plan.h"

namespace ts {
namespace {

class DdsPlanBuilder {
  public:
    DdsPlanBuilder(const View& view, PlanShape shape)
        : view_(view),
          shape_(shape),
          group_rows_(shape.tile / view.row_block),
          pieces_(std::max(1, shape.step / view.col_block)) {}

    std::vector<int32_t> build() {
        struct Tile {
            Group group;
            std::vector<Columns> ranks;  // what each rank walks, equally long
        };
        std::vector<Tile> tiles;
        for (Group& group : shape_.ranks == 1 ? group_alike(view_, group_rows_)
                                              : pair_rows(view_, group_rows_ * shape_.ranks)) {
            group.resize(group_rows_ * shape_.ranks, -1);
            auto ranks = columns_of_ranks(group);
            tiles.push_back({std::move(group), std::move(ranks)});
        }
        std::stable_sort(tiles.begin(), tiles.end(), [&](const Tile& a, const Tile& b) {
            const int64_t first = weight_of(a.group), second = weight_of(b.group);
            return first != second ? first < second : a.ranks[0].size() > b.ranks[0].size();
        });
        for (const Tile& tile : tiles) add_tile(tile.group, tile.ranks);
        PlanHeader header{};
        header.tiles = static_cast<int32_t>(tiles.size());
        header.steps = static_cast<int32_t>(masks_.size()) / shape_.ranks;
        header.group_rows = group_rows_;
        header.pieces = pieces_;
        return assemble(header, {tiles_, rows_, masks_, k_, slots_});
    }

  private:
    using Columns = std::vector<Column>;

    int64_t weight_of(const Group& group) const { return group.front() / view_.weight_rows(); }

    // The columns of each rank's rows, padded to whole steps, in an order in which the ranks walk together
    // those that they share; only the last steps of one of them may be empty.
    std::vector<Columns> columns_of_ranks(const Group& group) const {
        std::vector<Columns> ranks;
        for (int32_t rank = 0; rank < shape_.ranks; ++rank) {
            const auto first = group.begin() + rank * group_rows_;
            ranks.push_back(columns_of(view_, Group(first, first + group_rows_), group_rows_));
        }
        if (shape_.ranks == 2) share_columns(ranks[0], ranks[1]);
        size_t longest = 0;
        for (const Columns& columns : ranks) longest = std::max(longest, columns.size());
        const size_t padded = (longest + pieces_ - 1) / pieces_ * pieces_;
        for (Columns& columns : ranks) columns.resize(padded, {-1, std::vector<int32_t>(group_rows_, -1)});
        return ranks;
    }

    // Moves the columns that both have to the front, as many as fill whole steps.
    void share_columns(Columns& a, Columns& b) const {
        std::vector<int32_t> shared;
        for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
            if (a[i].col == b[j].col) shared.push_back(a[i].col);
            const bool first = a[i].col <= b[j].col, second = b[j].col <= a[i].col;
            i += first;
            j += second;
        }
        shared.resize(shared.size() / pieces_ * pieces_);
        for (Columns* columns : {&a, &b})
            std::stable_partition(columns->begin(), columns->end(), [&](const Column& column) {
                return std::binary_search(shared.begin(), shared.end(), column.col);
            });
    }

    void add_tile(const Group& group, const std::vector<Columns>& ranks) {
        const auto first = static_cast<int32_t>(masks_.size()) / shape_.ranks;
        for (size_t c = 0; c < ranks[0].size(); c += pieces_) {
            // A block wider than a step takes several, with one piece each.
            for (int32_t k = 0; k < std::max(view_.col_block, shape_.step); k += shape_.step)
                for (const Columns& columns : ranks) add_step(columns, c, k);
        }
        tiles_.push_back(first);
        tiles_.push_back(static_cast<int32_t>(masks_.size()) / shape_.ranks - first);
        rows_.insert(rows_.end(), group.begin(), group.end());
    }

    void add_step(const Columns& columns, size_t first, int32_t k) {
        uint32_t mask = 0;
        for (int32_t p = 0; p < pieces_; ++p) {
            const Column& column = columns[first + p];
            k_.push_back(column.col < 0 ? -1 : column.col * view_.col_block + k);
            for (int32_t i = 0; i < group_rows_; ++i) {
                slots_.push_back(column.slots[i]);
                if (column.slots[i] >= 0) mask |= block_mask(p, i);
            }
        }
        masks_.push_back(static_cast<int32_t>(mask));
    }

    // `in_group`: of a row in its group.
    uint32_t block_mask(int32_t piece, int32_t in_group) const {
        const int32_t quarters = std::max(4 / pieces_, 1), tiles = view_.row_block / 16;
        const uint32_t columns = ((1u << quarters) - 1) << piece * 4 / pieces_;
        uint32_t mask = 0;
        for (int32_t i = in_group * tiles; i < (in_group + 1) * tiles; ++i) mask |= columns << 4 * i;
        return mask;
    }

    View view_;
    PlanShape shape_;
    int32_t group_rows_;
    int32_t pieces_;
    std::vector<int32_t> tiles_, rows_, masks_, k_, slots_;
};

}  // namespace

std::vector<int32_t> build_dds_plan(const View& view, PlanShape shape) {
    return DdsPlanBuilder(view, shape).build();
}

}  // namespace ts
