// Plans of sdd by macro-tiles.
#include "plan/builders.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "plan/host_plan.h"

namespace ts {
namespace {

class SddPlanBuilder {
  public:
    SddPlanBuilder(const View& view, PlanShape shape)
        : view_(view), group_rows_(shape.tile / view.row_block), pieces_(shape.step / view.col_block) {}

    std::vector<int32_t> build() {
        for (const Group& group : group_alike(view_, group_rows_)) {
            const auto columns = columns_of(view_, group, group_rows_);
            for (size_t first = 0; first < columns.size(); first += pieces_) add_tile(group, columns, first);
        }
        PlanHeader header{};
        header.tiles = static_cast<int32_t>(counts_.size());
        header.group_rows = group_rows_;
        header.pieces = pieces_;
        return assemble(header, {counts_, rows_, masks_, k_, slots_});
    }

  private:
    void add_tile(const Group& group, const std::vector<Column>& columns, size_t first) {
        const int32_t count = std::min<int32_t>(pieces_, static_cast<int32_t>(columns.size() - first));
        counts_.push_back(count);
        for (int32_t i = 0; i < group_rows_; ++i) {
            rows_.push_back(i < static_cast<int32_t>(group.size()) ? group[i] : -1);
            const int32_t mask = row_mask(columns, first, count, i);
            masks_.insert(masks_.end(), view_.row_block / 16, mask);
        }
        for (int32_t p = 0; p < pieces_; ++p) {
            k_.push_back(p < count ? columns[first + p].col * view_.col_block : -1);
            for (int32_t i = 0; i < group_rows_; ++i)
                slots_.push_back(p < count ? columns[first + p].slots[i] : -1);
        }
    }

    int32_t row_mask(const std::vector<Column>& columns, size_t first, int32_t count,
                     int32_t in_group) const {
        const int32_t tiles = view_.col_block / 16;
        int32_t mask = 0;
        for (int32_t p = 0; p < count; ++p)
            if (columns[first + p].slots[in_group] >= 0) mask |= ((1 << tiles) - 1) << p * tiles;
        return mask;
    }

    View view_;
    int32_t group_rows_;
    int32_t pieces_;
    std::vector<int32_t> counts_, rows_, masks_, k_, slots_;
};

}  // namespace

std::vector<int32_t> build_sdd_plan(const View& view, PlanShape shape) {
    return SddPlanBuilder(view, shape).build();
}

}  // namespace ts
