#include "list_plan.h"

#include <algorithm>
#include <tuple>

namespace ts {
namespace {

struct Block {
    int32_t unit;  // of x
    int32_t row;
    int32_t column;
    int32_t slot;
};

class ListPlanBuilder {
  public:
    explicit ListPlanBuilder(const Pattern& pattern)
        : pattern_(pattern),
          unit_blocks_(kListUnit / pattern.block_rows),
          rows_(static_cast<int32_t>(pattern.out_features / pattern.block_rows)),
          group_units_(list_group(pattern)),
          blocks_(list_blocks(pattern)) {}

    ListPlan build() {
        const int32_t group_rows = group_units_ * unit_blocks_;
        for (int32_t row = 0; row < rows_; row += group_rows)
            add_group(row, std::min(rows_, row + group_rows));
        plan_.header.tiles = static_cast<int32_t>(plan_.tiles.size() / 4);
        plan_.header.group_rows = group_rows;
        return std::move(plan_);
    }

  private:
    void add_group(int32_t first_row, int32_t end_row) {
        std::vector<Block> blocks;
        for (int32_t row = first_row; row < end_row; ++row)
            for (int32_t e = pattern_.rows.ptr[row]; e < pattern_.rows.ptr[row + 1]; ++e) {
                const int32_t column = pattern_.rows.idx[e];
                blocks.push_back({column / unit_blocks_, row, column, pattern_.rows.slot[e]});
            }
        std::stable_sort(blocks.begin(), blocks.end(),
                         [](const Block& a, const Block& b) { return a.unit < b.unit; });
        const int32_t most_units = kListUnits - group_units_;
        std::vector<Block> tile;
        int32_t units = 0;
        for (const Block& block : blocks) {
            const bool is_new = tile.empty() || tile.back().unit != block.unit;
            if (static_cast<int32_t>(tile.size()) == kListWarps * blocks_ ||
                (is_new && units == most_units)) {
                add_tile(tile);
                tile.clear();
                units = 0;
            }
            units += tile.empty() || is_new;
            tile.push_back(block);
        }
        if (!tile.empty()) add_tile(tile);
    }

    void add_tile(std::vector<Block> blocks) {
        std::sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) {
            return std::tie(a.row, a.column) < std::tie(b.row, b.column);
        });
        std::vector<int32_t> of_y, of_x;  // units
        for (const Block& block : blocks) {
            of_y.push_back(block.row / unit_blocks_);
            of_x.push_back(block.unit);
        }
        for (std::vector<int32_t>* units : {&of_y, &of_x}) {
            std::sort(units->begin(), units->end());
            units->erase(std::unique(units->begin(), units->end()), units->end());
        }
        const auto count = static_cast<int32_t>(blocks.size()), y_count = static_cast<int32_t>(of_y.size()),
                   x_count = static_cast<int32_t>(of_x.size());
        const int32_t of_warp = (count + kListWarps - 1) / kListWarps;
        plan_.tiles.insert(plan_.tiles.end(), {y_count, x_count, count, of_warp});
        for (const std::vector<int32_t>* units : {&of_y, &of_x})
            for (const int32_t unit : *units) plan_.units.push_back(unit * kListUnit);
        plan_.units.insert(plan_.units.end(), kListUnits - y_count - x_count, -1);

        const size_t first = plan_.slots.size();
        plan_.slots.resize(first + kListWarps * blocks_, -1);
        plan_.masks.resize(first + kListWarps * blocks_, 0);
        for (int32_t i = 0; i < count; ++i) {
            const Block& block = blocks[i];
            const size_t at = first + i / of_warp * blocks_ + i % of_warp;
            const bool is_new = i % of_warp == 0 || block.row != blocks[i - 1].row;
            const auto mask = static_cast<uint32_t>(strip_of(block.column, of_x) + 4 * y_count) |
                              static_cast<uint32_t>(strip_of(block.row, of_y)) << 16 |
                              static_cast<uint32_t>(is_new) << 31;
            plan_.slots[at] = block.slot;
            plan_.masks[at] = static_cast<int32_t>(mask);
        }
    }

    // Where a block row or column begins in some units, in 16 features.
    int32_t strip_of(int32_t line, const std::vector<int32_t>& units) const {
        const auto unit = std::lower_bound(units.begin(), units.end(), line / unit_blocks_) - units.begin();
        return 4 * static_cast<int32_t>(unit) + line % unit_blocks_ * (pattern_.block_rows / 16);
    }

    const Pattern& pattern_;
    int32_t unit_blocks_;  // block rows or columns of a unit
    int32_t rows_;
    int32_t group_units_;
    int32_t blocks_;  // of a warp
    ListPlan plan_{};
};

}  // namespace

ListPlan build_list_plan(const Pattern& pattern) { return ListPlanBuilder(pattern).build(); }

}  // namespace ts
