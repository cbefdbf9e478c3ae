#include "plan/strip_builder.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

#include "plan/strip_tiles.h"

namespace ts {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A row is a strip or, where blocks are taller, the strips of a block row.
class StripPlanBuilder {
  public:
    explicit StripPlanBuilder(const Pattern& pattern)
        : pattern_(pattern),
          unit_(strip_unit(pattern)),
          window_(kStripWindow / unit_),
          row_strips_(std::max(1, pattern.block_rows / kStripFeatures)),
          rows_(static_cast<int32_t>(divide_up(pattern.out_features, row_strips_ * kStripFeatures))),
          rows_per_strip_(std::max(1, kStripFeatures / pattern.block_rows)),
          cols_per_unit_(std::max(1, unit_ / pattern.block_cols)),
          left_(rows_, UnitSet(divide_up(pattern.in_features, unit_))),
          slots_(rows_) {
        for (int32_t row = 0; row < rows_; ++row) find_units(row);
    }

    StripPlan build() {
        if (are_wide_blocks(pattern_)) {
            add_block_pairs();
        } else {
            if (row_strips_ > 1)
                add_block_rows();
            else
                add_strips();
            std::stable_sort(tiles_.begin(), tiles_.end(),
                             [&](const StripTile& a, const StripTile& b) { return before(a, b); });
        }
        StripPlan plan{};
        plan.header.tiles = static_cast<int32_t>(tiles_.size());
        plan.header.unit_blocks = unit_blocks();
        plan.header.units = 2 * window_;
        for (const StripTile& tile : tiles_) write(tile, plan);
        return plan;
    }

  private:
    void find_units(int32_t row) {
        const int32_t bn = pattern_.block_rows, bk = pattern_.block_cols;
        for (int32_t i = 0; i < rows_per_strip_; ++i) {
            const int32_t block_row = row * rows_per_strip_ + i;
            if (int64_t{block_row} * bn >= pattern_.out_features) break;
            for (int32_t e = pattern_.rows.ptr[block_row]; e < pattern_.rows.ptr[block_row + 1]; ++e) {
                const int32_t first = pattern_.rows.idx[e] * bk;
                for (int32_t k = first; k < first + bk; k += std::min(unit_, bk))
                    add_block(row, k / unit_, i * cols_per_unit_ + k % unit_ / bk, pattern_.rows.slot[e]);
            }
        }
    }

    // In a strip by a unit.
    int32_t unit_blocks() const { return rows_per_strip_ * cols_per_unit_; }

    // `place`: among the blocks of the row's unit.
    void add_block(int32_t row, int32_t unit, int32_t place, int32_t slot) {
        const auto [it, is_new] = slots_[row].try_emplace(unit, unit_blocks(), -1);
        if (is_new) left_[row].insert(unit);
        it->second[place] = slot;
    }

    // Both halves share all units.
    void add_block_rows() {
        for (int32_t row = 0; row < rows_; ++row)
            while (left_[row].size() > 0) {
                const Units units = left_[row].take(window_);
                tiles_.push_back({{2 * row, 2 * row + 1}, units, window_, 0, 0});
                remove(row, units);
            }
    }

    // A tile is two blocks of a line: of a row, or of a column where x is wider than y, so that most tiles
    // that need the same features of the wider one run at a time. A line with an odd number of blocks gives
    // one to the line that crosses it there, so that nearly all find a second one.
    void add_block_pairs() {
        const bool by_column = pattern_.out_features < pattern_.in_features;
        Lines lines = lines_of(by_column), crossing = lines_of(!by_column);
        std::vector<StripTile> single;
        for (int32_t k = 0; k < static_cast<int32_t>(crossing.size()); ++k) {
            const Units given = give_blocks(lines, crossing[k], k);
            add_line(k, given, !by_column, single);
        }
        for (int32_t k = 0; k < static_cast<int32_t>(lines.size()); ++k)
            add_line(k, lines[k], by_column, single);
        sort_by_two(single);
    }

    // For each block row or column, where its blocks are.
    using Lines = std::vector<Units>;
    Lines lines_of(bool columns) const {
        const Adjacency& rows = pattern_.rows;
        Lines lines(columns ? pattern_.in_features / pattern_.block_cols : rows_);
        for (int32_t row = 0; row < rows_; ++row)
            for (int32_t e = rows.ptr[row]; e < rows.ptr[row + 1]; ++e)
                lines[columns ? rows.idx[e] : row].push_back(columns ? row : rows.idx[e]);
        return lines;
    }

    // Takes from lines what they give to one that crosses them there: the last block of those that have an
    // odd number and, if these are odd too, the block of a line that can give another one later.
    static Units give_blocks(Lines& lines, const Units& crossed, int32_t at) {
        Units given;
        int32_t spare = -1;
        for (const int32_t k : crossed) {
            const bool is_odd = lines[k].size() % 2 != 0;
            if (lines[k].back() > at)
                spare = spare < 0 || is_odd ? k : spare;
            else if (is_odd)
                given.push_back(k);
        }
        if (given.size() % 2 != 0 && spare >= 0)
            given.insert(std::lower_bound(given.begin(), given.end(), spare), spare);
        for (const int32_t k : given) lines[k].erase(std::lower_bound(lines[k].begin(), lines[k].end(), at));
        return given;
    }

    // Adds two tiles at a time. The last may be `single`.
    void add_line(int32_t line, const Units& blocks, bool swapped, std::vector<StripTile>& single) {
        std::vector<StripTile> tiles;
        for (size_t i = 0; i < blocks.size(); i += 2) {
            tiles.push_back({{2 * line, 2 * line + 1}, {}, window_, 0, 0, swapped});
            for (size_t j = i; j < std::min(i + 2, blocks.size()); ++j)
                tiles.back().units.insert(tiles.back().units.end(), {2 * blocks[j], 2 * blocks[j] + 1});
        }
        if (tiles.size() % 2 != 0) {
            single.push_back(std::move(tiles.back()));
            tiles.pop_back();
        }
        std::move(tiles.begin(), tiles.end(), std::back_inserter(tiles_));
    }

    // Sorts by the first of two tiles each. Tiles of different lines come together.
    void sort_by_two(std::vector<StripTile>& single) {
        std::stable_sort(single.begin(), single.end(),
                         [&](const StripTile& a, const StripTile& b) { return before(a, b); });
        std::move(single.begin(), single.end(), std::back_inserter(tiles_));
        std::vector<size_t> order(tiles_.size() / 2);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](size_t a, size_t b) { return before(tiles_[2 * a], tiles_[2 * b]); });
        std::vector<StripTile> sorted;
        for (const size_t i : order) sorted.insert(sorted.end(), {tiles_[2 * i], tiles_[2 * i + 1]});
        if (tiles_.size() % 2 != 0) sorted.push_back(tiles_.back());
        tiles_ = std::move(sorted);
    }

    void add_strips() {
        // Two strips cost less than one with twice the units if they share more units than fill a strip.
        for (int32_t common = window_; common > kStripFeatures / unit_; --common)
            for (int32_t strip = 0; strip < rows_; ++strip) add_pairs(strip, common);
        for (int32_t strip = 0; strip < rows_; ++strip)
            while (left_[strip].size() > window_) add_tile(strip, -1, left_[strip].take(2 * window_), {}, {});
        add_rests();
    }

    // Tiles of this strip and near ones that have `common` or more units in common with it.
    void add_pairs(int32_t strip, int32_t common) {
        while (left_[strip].size() >= window_) {
            const int32_t first = strip / kNeighbours * kNeighbours;
            int32_t partner = -1, most = common - 1;
            for (int32_t other = first; other < std::min(first + kNeighbours, rows_); ++other) {
                if (other == strip || left_[other].size() < window_) continue;
                const int32_t count = left_[strip].count_common(left_[other]);
                if (count > most) partner = other, most = count;
            }
            if (partner < 0) return;
            const UnitSet &a = left_[strip], &b = left_[partner];
            const Units shared = a.take_common(b, common);
            const int32_t rest = window_ - common;
            add_tile(strip, partner, shared, without(shared, a).take_private(b, rest),
                     without(shared, b).take_private(a, rest));
        }
    }

    static UnitSet without(const Units& units, UnitSet set) {
        for (const int32_t unit : units) set.erase(unit);
        return set;
    }

    // Strips with at most a window of units left, the longest with the shortest.
    void add_rests() {
        std::vector<int32_t> rests;
        for (int32_t strip = 0; strip < rows_; ++strip)
            if (left_[strip].size() > 0) rests.push_back(strip);
        std::stable_sort(rests.begin(), rests.end(),
                         [&](int32_t a, int32_t b) { return left_[a].size() > left_[b].size(); });
        for (size_t i = 0, end = rests.size(); i < end; ++i) {
            const UnitSet& first = left_[rests[i]];
            const bool paired =
                i + 1 < end && first.size() + left_[rests[end - 1]].size() <= room_of_two_strips();
            if (!paired) {
                add_tile(rests[i], -1, first.take(window_), {}, {});
                continue;
            }
            const UnitSet& second = left_[rests[--end]];
            const Units shared = first.take_common(second, window_);
            add_tile(rests[i], rests[end], shared, first.take_private(second, window_),
                     second.take_private(first, window_));
        }
    }

    int32_t room_of_two_strips() const { return (kStripTileFeatures - 2 * kStripFeatures) / unit_; }

    // Up to two windows of units for one strip, all of them `shared`, or a window for each of two strips. The
    // shared units lie between those of the first strip alone and those of the second alone.
    void add_tile(int32_t first, int32_t second, const Units& shared, const Units& of_first,
                  const Units& of_second) {
        StripTile tile{{first, second}, of_first, window_, window_, window_};
        tile.units.insert(tile.units.end(), shared.begin(), shared.end());
        if (second >= 0) {
            tile.first_end = tile.unit_count();
            tile.second_begin = static_cast<int32_t>(of_first.size());
            tile.second_window = std::min(tile.second_begin, room_of_two_strips() - window_);
            tile.units.insert(tile.units.end(), of_second.begin(), of_second.end());
            remove(second, shared);
            remove(second, of_second);
        }
        remove(first, shared);
        remove(first, of_first);
        tiles_.push_back(std::move(tile));
    }

    void remove(int32_t row, const Units& units) {
        for (const int32_t unit : units) left_[row].erase(unit);
    }

    // Tiles that run at a time take equally long, and lie close along the longer side of the weight.
    bool before(const StripTile& a, const StripTile& b) const {
        const int32_t a_features = a.features(unit_), b_features = b.features(unit_);
        if (a_features != b_features) return a_features > b_features;
        const bool wide = pattern_.in_features > pattern_.out_features;
        const auto place = [&](const StripTile& tile) {
            return wide == tile.swapped ? tile.strips[0] : tile.units[0];
        };
        return place(a) < place(b);
    }

    void write(const StripTile& tile, StripPlan& plan) const {
        const int32_t second = tile.strips[1] < 0 ? -1 : tile.strips[1] * kStripFeatures;
        plan.tiles.insert(plan.tiles.end(), {tile.strips[0] * kStripFeatures, second, tile.unit_count(),
                                             tile.swapped ? -1 : tile.second_window});
        for (int32_t i = 0; i < 2 * window_; ++i)
            plan.units.push_back(i < tile.unit_count() ? tile.units[i] * unit_ : -1);
        const int32_t second_strip = tile.strips[second < 0 ? 0 : 1];
        write_slots(tile, tile.strips[0], 0, 0, std::min(tile.first_end, tile.unit_count()), plan.slots);
        write_slots(tile, second_strip, tile.second_window, tile.second_begin, tile.unit_count(), plan.slots);
    }

    // Writes the slots of units `begin` to `end`, as seen through a window.
    void write_slots(const StripTile& tile, int32_t strip, int32_t window, int32_t begin, int32_t end,
                     Units& to) const {
        for (int32_t i = window; i < window + window_; ++i) {
            if (begin <= i && i < end) {
                const Units& blocks = tile.swapped ? slots_[tile.units[i] / row_strips_].at(strip)
                                                   : slots_[strip / row_strips_].at(tile.units[i]);
                to.insert(to.end(), blocks.begin(), blocks.end());
            } else {
                to.insert(to.end(), unit_blocks(), -1);
            }
        }
    }

    // Strips that share tiles are near each other, so that tiles computed at a time read few features.
    static constexpr int32_t kNeighbours = 32;

    const Pattern& pattern_;
    int32_t unit_;
    int32_t window_;  // in units
    int32_t row_strips_;
    int32_t rows_;
    int32_t rows_per_strip_;                       // block rows of a strip, at least 1
    int32_t cols_per_unit_;                        // block columns of a unit, at least 1
    std::vector<UnitSet> left_;                    // of each row: the units in no tile yet
    std::vector<std::map<int32_t, Units>> slots_;  // of each row: a unit's blocks
    std::vector<StripTile> tiles_;
};

}  // namespace

StripPlan build_strip_plan_of_one(const Pattern& pattern) { return StripPlanBuilder(pattern).build(); }

}  // namespace ts
