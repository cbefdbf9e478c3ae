// Plans of dds by aligned steps.
#include "plan/builders.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "plan/host_plan.h"

namespace ts {
namespace {

class AlignedPlanBuilder {
  public:
    AlignedPlanBuilder(const View& view, PlanShape shape)
        : view_(view),
          group_rows_(shape.tile / view.row_block),
          rank_rows_(group_rows_ / shape.ranks),
          side_(std::min(view.row_block, view.col_block)),
          step_(shape.step) {}

    std::vector<int32_t> build() {
        struct Tile {
            Group group;
            std::vector<int32_t> steps;  // as their first k
            int64_t blocks;

            std::pair<size_t, int64_t> cost() const { return {steps.size(), blocks}; }
        };
        std::vector<Group> groups = pair_rows(view_, group_rows_);
        for (Group& group : groups) group.resize(group_rows_, -1);
        PlanHeader header{};
        const StepFill fill = fill_of(groups);
        const int32_t places = rank_rows_ * view_.row_block / side_ * (step_ / side_);
        header.fill = fill.percent(places);
        if (fill.crowds(places, group_rows_ / rank_rows_)) step_ /= 2;
        std::vector<Tile> tiles;
        for (Group& group : groups) {
            auto steps = steps_of(group);
            int64_t blocks = 0;
            for (const int32_t row : group) blocks += row < 0 ? 0 : view_.length(row);
            tiles.push_back({std::move(group), std::move(steps), blocks});
        }
        std::stable_sort(tiles.begin(), tiles.end(),
                         [](const Tile& a, const Tile& b) { return a.cost() > b.cost(); });
        for (const Tile& tile : tiles) add_tile(tile.group, tile.steps);
        starts_.push_back(block_count());
        header.step = step_;
        header.tiles = static_cast<int32_t>(tiles.size());
        header.steps = static_cast<int32_t>(k_.size());
        header.group_rows = group_rows_;
        return assemble(header, {tiles_, rows_, masks_, k_, slots_, starts_});
    }

  private:
    int32_t block_count() const { return static_cast<int32_t>(slots_.size()); }

    StepFill fill_of(const std::vector<Group>& groups) const {
        StepFill fill;
        std::vector<int32_t> squares;  // of a rank, by step
        for (const Group& group : groups)
            for (auto rank = group.begin(); rank != group.end(); rank += rank_rows_) {
                squares.assign((view_.col_count * view_.col_block - 1) / step_ + 1, 0);
                for (const int32_t row : Group(rank, rank + rank_rows_)) {
                    if (row < 0) continue;
                    for (int32_t e = view_.rows.ptr[row]; e < view_.rows.ptr[row + 1]; ++e) {
                        const int32_t first = view_.rows.idx[e] * view_.col_block;
                        for (int32_t k = first; k < first + view_.col_block; k += side_)
                            squares[k / step_] += view_.row_block / side_;
                    }
                }
                for (const int32_t in_step : squares) fill.add(in_step);
            }
        return fill;
    }

    std::vector<int32_t> steps_of(const Group& group) const {
        std::vector<int32_t> steps;
        for (const int32_t row : group) {
            if (row < 0) continue;
            for (int32_t e = view_.rows.ptr[row]; e < view_.rows.ptr[row + 1]; ++e) {
                const int32_t first = view_.rows.idx[e] * view_.col_block;
                for (int32_t k = first; k < first + view_.col_block; k += step_)
                    steps.push_back(k / step_ * step_);
            }
        }
        std::sort(steps.begin(), steps.end());
        steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
        return steps;
    }

    void add_tile(const Group& group, const std::vector<int32_t>& steps) {
        tiles_.push_back(static_cast<int32_t>(k_.size()));
        tiles_.push_back(static_cast<int32_t>(steps.size()));
        rows_.insert(rows_.end(), group.begin(), group.end());
        k_.insert(k_.end(), steps.begin(), steps.end());
        for (const int32_t step : steps)
            for (auto rank = group.begin(); rank != group.end(); rank += rank_rows_) add_step(&*rank, step);
    }

    // The squares of a rank's rows in the step that begins at a k.
    void add_step(const int32_t* rows, int32_t step) {
        const int32_t across = view_.row_block / side_, squares = view_.col_block / side_ * across;
        const int32_t strips = side_ / 16;
        const uint32_t square = strips == 1 ? 0x1 : 0x33;
        starts_.push_back(block_count());
        const size_t first_mask = masks_.size();
        masks_.resize(first_mask + rank_rows_ * view_.row_block / 64 * 2);
        for (int32_t i = 0; i < rank_rows_ * across; ++i) {
            uint32_t mask = 0;
            const int32_t first = block_count() - starts_.back(), strip = i * strips, row = rows[i / across];
            if (row >= 0) {
                const int32_t* const end = view_.rows.idx + view_.rows.ptr[row + 1];
                const int32_t* col =
                    std::lower_bound(view_.rows.idx + view_.rows.ptr[row], end, step / view_.col_block);
                for (; col != end && *col * view_.col_block < step + step_; ++col) {
                    const int32_t begin = *col * view_.col_block,
                                  slot = view_.rows.slot[col - view_.rows.idx];
                    const int32_t first = std::max(begin, step),
                                  last = std::min(begin + view_.col_block, step + step_);
                    for (int32_t k = first; k < last; k += side_) {
                        mask |= square << ((k - step) / 4 + strip % 4);
                        slots_.push_back(slot * squares + (k - begin) / side_ + i % across);
                    }
                }
            }
            int32_t* const masks = &masks_[first_mask + strip / 4 * 2];
            masks[0] |= static_cast<int32_t>(mask);
            for (int32_t s = strip; s < strip + strips; ++s)
                masks[1] |= static_cast<int32_t>(static_cast<uint32_t>(first) << 8 * (s % 4));
        }
    }

    View view_;
    int32_t group_rows_;
    int32_t rank_rows_;
    int32_t side_;  // of a square
    int32_t step_;
    std::vector<int32_t> tiles_, rows_, masks_, k_, starts_, slots_;
};

}  // namespace

std::vector<int32_t> build_aligned_plan(const View& view, PlanShape shape) {
    return AlignedPlanBuilder(view, shape).build();
}

}  // namespace ts
