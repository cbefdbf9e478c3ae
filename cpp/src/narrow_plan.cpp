#include "narrow_plan.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "plan.h"

namespace ts {
namespace {

constexpr int32_t kRowFeatures = 32;
constexpr int32_t kGroups = 2;
constexpr int32_t kWords = 8;
constexpr int32_t kStagesAtOnce = 4;
constexpr int64_t kPartners = 512;  // block rows of nearly the same length that are compared

// The blocks of a row in one column, -1 where there is none.
struct Unit {
    int32_t col;
    int32_t slots[2];
};

using Profile = std::vector<int32_t>;  // units in each stage

struct Row {
    std::vector<int32_t> block_rows;
    std::vector<Unit> units;  // by column
    Profile profile;
};

class NarrowPlanBuilder {
  public:
    NarrowPlanBuilder(const Pattern& pattern, Op op, PlanShape shape)
        : shape_(shape),
          block_(pattern.block_rows),
          parts_(kRowFeatures / block_),
          group_rows_(shape.tile / kRowFeatures / kGroups),
          blocks_(op == Op::dds_nn ? pattern.cols : pattern.rows),
          features_(static_cast<int32_t>(op == Op::dds_nn ? pattern.in_features : pattern.out_features)),
          k_size_(static_cast<int32_t>(op == Op::dds_nn ? pattern.out_features : pattern.in_features)),
          stages_((k_size_ + shape.step - 1) / shape.step) {}

    std::vector<int32_t> build() {
        std::vector<Row> rows = make_rows();
        std::stable_sort(rows.begin(), rows.end(),
                         [](const Row& a, const Row& b) { return a.units.size() > b.units.size(); });
        const auto count = static_cast<int64_t>(rows.size());
        const int64_t tile_rows = int64_t{group_rows_} * kGroups * shape_.ranks;
        const int64_t tiles = (count + tile_rows - 1) / tile_rows;
        for (int64_t tile = 0; tile < tiles; ++tile)
            add_tile(deal(rows, (tile + 1) * count / tiles - tile * count / tiles));
        starts_.push_back(units_);
        PlanHeader header{};
        header.tiles = static_cast<int32_t>(tiles);
        header.steps = stages_;
        header.groups = group_rows_ * kGroups * parts_;
        header.pieces = parts_;
        header.reserved[0] = units_;
        return assemble(header, {tiles_, rows_, words_, starts_, slots_});
    }

  private:
    using Rows = std::vector<Row>;

    int32_t length(int32_t row) const { return blocks_.ptr[row + 1] - blocks_.ptr[row]; }

    Rows make_rows() const {
        std::vector<int32_t> left(features_ / block_);
        std::iota(left.begin(), left.end(), 0);
        std::stable_sort(left.begin(), left.end(),
                         [&](int32_t a, int32_t b) { return length(a) > length(b); });
        Rows rows;
        for (auto next = left.begin(); next != left.end();) {
            const int32_t first = *next++;
            if (parts_ == 1 || next == left.end()) {
                rows.push_back(make_row({first}));
                continue;
            }
            const auto last = next + std::min<int64_t>(kPartners, left.end() - next);
            const auto best = most_alike(first, next, last);
            std::rotate(next, best, best + 1);
            rows.push_back(make_row({first, *next++}));
        }
        return rows;
    }

    // Of some block rows the one that has most columns in common with another.
    template <class Iterator>
    Iterator most_alike(int32_t row, Iterator begin, Iterator end) const {
        std::vector<bool> columns(k_size_ / block_);
        for (int32_t e = blocks_.ptr[row]; e < blocks_.ptr[row + 1]; ++e) columns[blocks_.idx[e]] = true;
        const auto shared = [&](int32_t other) {
            return std::count_if(blocks_.idx + blocks_.ptr[other], blocks_.idx + blocks_.ptr[other + 1],
                                 [&](int32_t column) { return columns[column]; });
        };
        auto best = begin;
        auto most = shared(*begin);
        for (auto it = begin + 1; it != end; ++it) {
            const auto now = shared(*it);
            if (now > most) best = it, most = now;
        }
        return best;
    }

    Row make_row(std::vector<int32_t> block_rows) const {
        Row row{std::move(block_rows), {}, Profile(stages_)};
        for (size_t part = 0; part < row.block_rows.size(); ++part)
            for (int32_t e = blocks_.ptr[row.block_rows[part]]; e < blocks_.ptr[row.block_rows[part] + 1];
                 ++e) {
                Unit unit{blocks_.idx[e], {-1, -1}};
                unit.slots[part] = blocks_.slot[e];
                row.units.push_back(unit);
            }
        std::stable_sort(row.units.begin(), row.units.end(),
                         [](const Unit& a, const Unit& b) { return a.col < b.col; });
        return merge(std::move(row));
    }

    // Units of two block rows in one column become one.
    Row merge(Row row) const {
        std::vector<Unit> merged;
        for (const Unit& unit : row.units) {
            if (!merged.empty() && merged.back().col == unit.col)
                merged.back().slots[1] = unit.slots[1];
            else
                merged.push_back(unit);
        }
        row.units = std::move(merged);
        for (const Unit& unit : row.units) ++row.profile[unit.col * block_ / shape_.step];
        return row;
    }

    // Takes `count` of the longest rows and deals them out to the warpgroups of a tile. These wait for one
    // another now and then, so that each should have as many units in one stage as in the next.
    std::vector<Rows> deal(Rows& rows, int64_t count) const {
        constexpr int64_t kCandidates = 64;
        const int32_t lists = shape_.ranks * kGroups;
        std::vector<Rows> dealt(lists);
        std::vector<Profile> sums(lists, Profile(stages_));
        for (int64_t i = 0; i < count; ++i) {
            Profile& sum = sums[i % lists];
            const auto candidates =
                rows.begin() + std::min<int64_t>(kCandidates, static_cast<int64_t>(rows.size()));
            auto best = rows.begin();
            int64_t least = INT64_MAX;
            for (auto row = rows.begin(); row != candidates; ++row) {
                const int64_t now = unevenness(sum, row->profile);
                if (now < least) best = row, least = now;
            }
            for (int32_t stage = 0; stage < stages_; ++stage) sum[stage] += best->profile[stage];
            dealt[i % lists].push_back(std::move(*best));
            rows.erase(best);
        }
        return dealt;
    }

    // The variance of a sum of profiles, times the square of the number of stages.
    static int64_t unevenness(const Profile& a, const Profile& b) {
        int64_t sum = 0, squares = 0;
        for (size_t stage = 0; stage < a.size(); ++stage) {
            const int64_t units = a[stage] + b[stage];
            sum += units;
            squares += units * units;
        }
        return squares * static_cast<int64_t>(a.size()) - sum * sum;
    }

    void add_tile(const std::vector<Rows>& dealt) {
        size_t most = 0;
        for (const Rows& list : dealt) {
            size_t units = 0;
            for (const Row& row : list) units += row.units.size();
            most = std::max(most, units);
        }
        for (int32_t rank = 0; rank < shape_.ranks; ++rank) add_rank(&dealt[rank * kGroups]);
        tiles_.push_back(0);
        tiles_.push_back(kTileCost + kStageCost * stages_ +
                         static_cast<int32_t>(most) * block_ / kRowFeatures);
    }

    void add_rank(const Rows* groups) {
        for (int32_t group = 0; group < kGroups; ++group)
            for (int32_t i = 0; i < group_rows_; ++i)
                for (int32_t part = 0; part < parts_; ++part)
                    rows_.push_back(block_row(groups[group], i, part));
        const size_t first_word = words_.size(),
                     padded = (stages_ + kStagesAtOnce - 1) / kStagesAtOnce * kStagesAtOnce;
        words_.resize(first_word + kGroups * padded * kWords);
        for (int32_t stage = 0; stage < stages_; ++stage) {
            starts_.push_back(units_);
            for (int32_t group = 0; group < kGroups; ++group)
                add_stage(groups[group], stage, &words_[first_word + (group * padded + stage) * kWords]);
        }
    }

    static int32_t block_row(const Rows& rows, size_t row, size_t part) {
        return row < rows.size() && part < rows[row].block_rows.size() ? rows[row].block_rows[part] : -1;
    }

    void add_stage(const Rows& rows, int32_t stage, int32_t* words) {
        const int32_t columns = shape_.step / block_;
        words[group_rows_] = units_ - starts_.back();
        for (size_t i = 0; i < rows.size(); ++i) {
            const std::vector<Unit>& units = rows[i].units;
            auto unit = std::lower_bound(units.begin(), units.end(), stage * columns,
                                         [](const Unit& u, int32_t column) { return u.col < column; });
            uint32_t word = 0;
            for (int32_t shift = 0; unit != units.end() && unit->col < (stage + 1) * columns;
                 ++unit, shift += 4) {
                const int32_t k16 = (unit->col - stage * columns) * block_ / 16;
                word |= static_cast<uint32_t>(2 * k16 + 1) << shift;
                slots_.insert(slots_.end(), unit->slots, unit->slots + parts_);
                ++units_;
            }
            words[i] = static_cast<int32_t>(word);
        }
    }

    // In units of 32 x 32, by the times of the product alone.
    static constexpr int32_t kStageCost = 2;
    static constexpr int32_t kTileCost = 12;

    PlanShape shape_;
    int32_t block_;
    int32_t parts_;       // block rows of a row
    int32_t group_rows_;  // rows of a warpgroup
    Adjacency blocks_;    // of each block row of the result's features
    int32_t features_;
    int32_t k_size_;
    int32_t stages_;
    int32_t units_ = 0;
    std::vector<int32_t> tiles_, rows_, words_, starts_, slots_;
};

}  // namespace

std::vector<int32_t> build_narrow_plan(const Pattern& pattern, Op op, PlanShape shape) {
    return NarrowPlanBuilder(pattern, op, shape).build();
}

}  // namespace ts
