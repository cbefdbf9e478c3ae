#include "plan.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "error.h"
#include "list_plan.h"
#include "problem.h"
#include "strip_plan.h"

namespace ts {
namespace {

// A pattern seen from the features that are grouped into macro-tiles.
struct View {
    Adjacency rows;
    int64_t row_count;
    int64_t col_count;
    int32_t row_block;  // features
    int32_t col_block;  // k

    int32_t length(int32_t row) const { return rows.ptr[row + 1] - rows.ptr[row]; }
};

View view_of(const Pattern& pattern, Op op) {
    if (op == Op::dds_nn)
        return {pattern.cols, block_col_count(pattern), block_row_count(pattern), pattern.block_cols,
                pattern.block_rows};
    return {pattern.rows, block_row_count(pattern), block_col_count(pattern), pattern.block_rows,
            pattern.block_cols};
}

// Columns of block rows as bits, to compare rows quickly.
class ColumnSets {
  public:
    explicit ColumnSets(const View& view)
        : words_((view.col_count + 63) / 64), bits_(view.row_count * words_) {
        for (int64_t row = 0; row < view.row_count; ++row)
            for (int32_t e = view.rows.ptr[row]; e < view.rows.ptr[row + 1]; ++e)
                bits_[row * words_ + view.rows.idx[e] / 64] |= uint64_t{1} << view.rows.idx[e] % 64;
    }

    std::vector<uint64_t> empty_set() const { return std::vector<uint64_t>(words_); }
    std::vector<uint64_t> set_of(int32_t row) const {
        return {bits_.begin() + row * words_, bits_.begin() + (row + 1) * words_};
    }
    void add(int32_t row, std::vector<uint64_t>& set) const {
        for (int64_t w = 0; w < words_; ++w) set[w] |= bits_[row * words_ + w];
    }
    int32_t overlap(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) const {
        int32_t both = 0;
        for (int64_t w = 0; w < words_; ++w) both += std::popcount(a[w] & b[w]);
        return both;
    }
    // |row and set| / |row or set|; two empty sets are alike.
    double similarity(int32_t row, const std::vector<uint64_t>& set) const {
        int64_t both = 0, either = 0;
        for (int64_t w = 0; w < words_; ++w) {
            both += std::popcount(bits_[row * words_ + w] & set[w]);
            either += std::popcount(bits_[row * words_ + w] | set[w]);
        }
        return either == 0 ? 1.0 : static_cast<double>(both) / static_cast<double>(either);
    }

  private:
    int64_t words_;
    std::vector<uint64_t> bits_;
};

using Group = std::vector<int32_t>;

// Greedy: the longest row left takes the rows most alike it. Rows of one group share the loads of
// the columns they have in common, and similar lengths keep the warps of a tile equally busy.
std::vector<Group> group_alike(const View& view, int32_t size) {
    std::vector<int32_t> order(view.row_count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return view.length(a) > view.length(b); });
    std::vector<Group> groups;
    if (size == 1) {
        for (const int32_t row : order) groups.push_back({row});
        return groups;
    }
    const ColumnSets sets(view);
    while (!order.empty()) {
        Group group{order.front()};
        order.erase(order.begin());
        std::vector<uint64_t> columns = sets.set_of(group[0]);
        while (static_cast<int32_t>(group.size()) < size && !order.empty()) {
            auto best = order.begin();
            double best_similarity = -1;
            for (auto it = order.begin(); it != order.end(); ++it) {
                const double similarity = sets.similarity(*it, columns);
                if (similarity > best_similarity) best = it, best_similarity = similarity;
            }
            group.push_back(*best);
            sets.add(*best, columns);
            order.erase(best);
        }
        std::sort(group.begin(), group.end());
        groups.push_back(std::move(group));
    }
    return groups;
}

struct Candidate {
    int32_t overlap;
    int32_t first, second;  // groups
};

// Pairs the groups that share most columns, greedily; one that is left over stays alone. A pair is the
// first group's places, then the second's.
std::vector<Group> pair_groups(const ColumnSets& sets, const std::vector<Group>& groups) {
    std::vector<std::vector<uint64_t>> columns;
    for (const Group& group : groups) {
        columns.push_back(sets.empty_set());
        for (const int32_t row : group)
            if (row >= 0) sets.add(row, columns.back());
    }
    std::vector<Candidate> candidates;
    const auto count = static_cast<int32_t>(groups.size());
    for (int32_t i = 0; i < count; ++i)
        for (int32_t j = i + 1; j < count; ++j)
            candidates.push_back({sets.overlap(columns[i], columns[j]), i, j});
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.overlap > b.overlap; });
    std::vector<bool> taken(groups.size());
    std::vector<Group> pairs;
    for (const auto& [overlap, first, second] : candidates) {
        if (taken[first] || taken[second]) continue;
        taken[first] = taken[second] = true;
        pairs.push_back(groups[first]);
        pairs.back().insert(pairs.back().end(), groups[second].begin(), groups[second].end());
    }
    for (size_t i = 0; i < groups.size(); ++i) {
        if (taken[i]) continue;
        pairs.push_back(groups[i]);
        pairs.back().resize(2 * groups[i].size(), -1);
    }
    return pairs;
}

// Groups of a power of two: rows are paired by the columns they share, pairs are paired again, and so on.
// Neighbours in a group have most in common, as do its halves.
std::vector<Group> pair_rows(const View& view, int32_t size) {
    std::vector<Group> groups(view.row_count);
    for (int32_t row = 0; row < view.row_count; ++row) groups[row] = {row};
    const ColumnSets sets(view);
    for (int32_t paired = 1; paired < size; paired *= 2) groups = pair_groups(sets, groups);
    return groups;
}

// The blocks of one column of a macro-tile: a slot for each row of the group, or -1.
struct Column {
    int32_t col;
    std::vector<int32_t> slots;
};

std::vector<Column> columns_of(const View& view, const Group& group, int32_t size) {
    std::vector<std::pair<int32_t, std::pair<int32_t, int32_t>>> entries;  // column, (place, slot)
    for (size_t i = 0; i < group.size(); ++i) {
        if (group[i] < 0) continue;
        for (int32_t e = view.rows.ptr[group[i]]; e < view.rows.ptr[group[i] + 1]; ++e)
            entries.push_back({view.rows.idx[e], {static_cast<int32_t>(i), view.rows.slot[e]}});
    }
    std::sort(entries.begin(), entries.end());
    std::vector<Column> columns;
    for (const auto& [col, block] : entries) {
        if (columns.empty() || columns.back().col != col)
            columns.push_back({col, std::vector<int32_t>(size, -1)});
        columns.back().slots[block.first] = block.second;
    }
    return columns;
}

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
        std::stable_sort(tiles.begin(), tiles.end(),
                         [](const Tile& a, const Tile& b) { return a.ranks[0].size() > b.ranks[0].size(); });
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
        const int32_t quarters = 4 / pieces_, tiles = view_.row_block / 16;
        const uint32_t columns = ((1u << quarters) - 1) << piece * quarters;
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

// Of dds by aligned steps.
class AlignedPlanBuilder {
  public:
    AlignedPlanBuilder(const View& view, PlanShape shape)
        : view_(view),
          group_rows_(shape.tile / view.row_block),
          rank_rows_(group_rows_ / shape.ranks),
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
        const int32_t places = rank_rows_ * step_ / view_.row_block;
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
                        for (int32_t k = first; k < first + view_.col_block; k += view_.row_block)
                            ++squares[k / step_];
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
        const int32_t strips = view_.row_block / 16, squares = view_.col_block / view_.row_block;
        const uint32_t square = strips == 1 ? 0x1 : 0x33;
        starts_.push_back(block_count());
        const size_t first_mask = masks_.size();
        masks_.resize(first_mask + rank_rows_ * strips / 4 * 2);
        for (int32_t i = 0; i < rank_rows_; ++i) {
            uint32_t mask = 0;
            const int32_t first = block_count() - starts_.back(), strip = i * strips;
            if (rows[i] >= 0) {
                const int32_t* const end = view_.rows.idx + view_.rows.ptr[rows[i] + 1];
                const int32_t* col =
                    std::lower_bound(view_.rows.idx + view_.rows.ptr[rows[i]], end, step / view_.col_block);
                for (; col != end && *col * view_.col_block < step + step_; ++col) {
                    const int32_t begin = *col * view_.col_block,
                                  slot = view_.rows.slot[col - view_.rows.idx];
                    const int32_t first = std::max(begin, step),
                                  last = std::min(begin + view_.col_block, step + step_);
                    for (int32_t k = first; k < last; k += view_.row_block) {
                        mask |= square << ((k - step) / 4 + strip % 4);
                        slots_.push_back(slot * squares + (k - begin) / view_.row_block);
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
    int32_t step_;
    std::vector<int32_t> tiles_, rows_, masks_, k_, starts_, slots_;
};

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

// Refuses a weight for which the sets of columns, or the list of all pairs of block rows, would take the
// machine's memory for a pattern that may have hardly a block.
void check_host_size(const View& view, PlanShape shape) {
    constexpr int64_t kMostBytes = int64_t{8} << 30;
    const bool pairs = shape.kind == PlanKind::aligned || shape.ranks > 1;
    const int64_t sets = (view.col_count + 63) / 64 * static_cast<int64_t>(sizeof(uint64_t));
    const int64_t row_bytes =
        sets + (pairs ? view.row_count / 2 * static_cast<int64_t>(sizeof(Candidate)) : 0);
    if (view.row_count > 0 && row_bytes > kMostBytes / view.row_count)
        fail(TS_UNSUPPORTED, "the weight has ", view.row_count, " x ", view.col_count,
             " places for blocks; the host's builder would need more than ", kMostBytes, " bytes");
}

std::vector<int32_t> build_words(const Pattern& pattern, Op op, PlanShape shape) {
    const View view = view_of(pattern, op);
    check_host_size(view, shape);
    if (shape.kind == PlanKind::strips) {
        const StripPlan plan = build_strip_plan(pattern);
        return assemble(plan.header, {plan.tiles, {}, {}, plan.units, plan.slots});
    }
    if (shape.kind == PlanKind::lists) {
        const ListPlan plan = build_list_plan(pattern);
        return assemble(plan.header, {plan.tiles, {}, plan.masks, plan.units, plan.slots});
    }
    if (op == Op::sdd_tn) return SddPlanBuilder(view, shape).build();
    if (shape.kind == PlanKind::aligned) return AlignedPlanBuilder(view, shape).build();
    return DdsPlanBuilder(view, shape).build();
}

}  // namespace

std::vector<int32_t> assemble(PlanHeader header, const std::vector<std::vector<int32_t>>& sections) {
    int32_t* const offsets[] = {&header.tiles_at, &header.rows_at,  &header.masks_at,
                                &header.k_at,     &header.slots_at, &header.starts_at};
    int64_t at = sizeof(PlanHeader) / sizeof(int32_t);
    for (size_t i = 0; i < sections.size(); ++i) {
        *offsets[i] = static_cast<int32_t>(at);
        at += static_cast<int64_t>((sections[i].size() + 3) / 4 * 4);  // each section 16-byte aligned
        if (at > std::numeric_limits<int32_t>::max())
            fail(TS_UNSUPPORTED, "the plan would take more than ", std::numeric_limits<int32_t>::max(),
                 " words, more than 32 bits can number");
    }
    header.words = static_cast<int32_t>(at);
    std::vector<int32_t> plan(at, -1);
    std::memcpy(plan.data(), &header, sizeof header);
    for (size_t i = 0; i < sections.size(); ++i)
        std::copy(sections[i].begin(), sections[i].end(), plan.begin() + *offsets[i]);
    return plan;
}

void check_plan_shape(const Pattern& pattern, Op op, PlanShape shape) {
    if (shape.kind == PlanKind::aligned) {
        const View view = view_of(pattern, op);
        require(view.row_block <= 32 && view.row_block <= view.col_block,
                "the kernel's blocks have 16 or 32 features of the result and at least as many of k, not ",
                view.row_block, " and ", view.col_block);
    } else if (shape.kind == PlanKind::lists) {
        require(are_listed_blocks(pattern), "the kernel's blocks are 16 x 16, not ", pattern.block_rows,
                " x ", pattern.block_cols);
    } else if (shape.kind == PlanKind::tiles) {
        const int32_t features = view_of(pattern, op).row_block;
        require(features <= shape.tile, "the kernel's tile of ", shape.tile,
                " features is less than the block's ", features);
    }
}

std::vector<int32_t> build_plan(const Pattern& pattern, Op op, PlanShape shape) {
    if (shape.tile == 0) return {};
    check_plan_shape(pattern, op, shape);
    std::vector<int32_t> plan = build_words(pattern, op, shape);
    plan[offsetof(PlanHeader, key) / sizeof(int32_t)] = plan_key(pattern, op, shape);
    return plan;
}

}  // namespace ts
