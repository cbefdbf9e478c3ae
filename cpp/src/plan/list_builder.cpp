#include "plan/list_builder.h"

#include <algorithm>
#include <tuple>

namespace ts {
namespace {

constexpr int32_t kUnitBlocks = kListUnit / 16;  // block rows or columns of a unit

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
          rows_(static_cast<int32_t>(pattern.out_features / pattern.block_rows)),
          group_units_(list_group(pattern)) {}

    ListPlan build() {
        const int32_t group_rows = group_units_ * kUnitBlocks;
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
                blocks.push_back({column / kUnitBlocks, row, column, pattern_.rows.slot[e]});
            }
        std::stable_sort(blocks.begin(), blocks.end(),
                         [](const Block& a, const Block& b) { return a.unit < b.unit; });
        const int32_t most_units = kListUnits - group_units_;
        std::vector<Block> tile;
        int32_t units = 0;
        for (const Block& block : blocks) {
            const bool is_new = tile.empty() || tile.back().unit != block.unit;
            if (static_cast<int32_t>(tile.size()) == kListTileBlocks || (is_new && units == most_units)) {
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
            of_y.push_back(block.row / kUnitBlocks);
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
        plan_.slots.resize(first + kListTileBlocks, -1);
        plan_.masks.resize(first + kListTileBlocks, 0);
        for (int32_t i = 0; i < count; ++i) {
            const Block& block = blocks[i];
            const size_t at = first + i / of_warp * kListBlocks + i % of_warp;
            const bool is_new = i % of_warp == 0 || block.row != blocks[i - 1].row;
            const auto mask = static_cast<uint32_t>(strip_of(block.column, of_x) + kUnitBlocks * y_count) |
                              static_cast<uint32_t>(strip_of(block.row, of_y)) << 16 |
                              static_cast<uint32_t>(is_new) << 31;
            plan_.slots[at] = block.slot;
            plan_.masks[at] = static_cast<int32_t>(mask);
        }
    }

    // The place of a block row or column in some units, counted in 16 features.
    static int32_t strip_of(int32_t line, const std::vector<int32_t>& units) {
        const auto unit = std::lower_bound(units.begin(), units.end(), line / kUnitBlocks) - units.begin();
        return kUnitBlocks * static_cast<int32_t>(unit) + line % kUnitBlocks;
    }

    const Pattern& pattern_;
    int32_t rows_;
    int32_t group_units_;
    ListPlan plan_{};
};

}  // namespace

ListPlan build_list_plan(const Pattern& pattern) { return ListPlanBuilder(pattern).build(); }

}  // namespace ts
