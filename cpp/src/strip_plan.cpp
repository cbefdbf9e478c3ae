#include "strip_plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <numeric>
#include <utility>

namespace ts {
namespace {

using Units = std::vector<int32_t>;

// The units of a strip that are in no tile yet, as bits.
class UnitSet {
  public:
    explicit UnitSet(int64_t size) : words_((size + 63) / 64) {}

    void insert(int32_t unit) { words_[unit / 64] |= uint64_t{1} << unit % 64, ++size_; }
    void erase(int32_t unit) { words_[unit / 64] &= ~(uint64_t{1} << unit % 64), --size_; }
    int32_t size() const { return size_; }

    int32_t count_common(const UnitSet& other) const {
        int32_t count = 0;
        for (size_t w = 0; w < words_.size(); ++w) count += std::popcount(words_[w] & other.words_[w]);
        return count;
    }
    // Up to `limit` units that are also in `other`, or that are not.
    Units take_common(const UnitSet& other, int32_t limit) const { return take(other, 0, limit); }
    Units take_private(const UnitSet& other, int32_t limit) const { return take(other, ~uint64_t{0}, limit); }
    Units take(int32_t limit) const { return take(UnitSet(64 * static_cast<int64_t>(words_.size())), ~uint64_t{0}, limit); }

  private:
    Units take(const UnitSet& other, uint64_t inverse, int32_t limit) const {
        Units units;
        for (size_t w = 0; w < words_.size(); ++w)
            for (uint64_t bits = words_[w] & (other.words_[w] ^ inverse); bits != 0; bits &= bits - 1) {
                if (static_cast<int32_t>(units.size()) == limit) return units;
                units.push_back(static_cast<int32_t>(64 * w) + std::countr_zero(bits));
            }
        return units;
    }

    std::vector<uint64_t> words_;
    int32_t size_ = 0;
};

struct Tile {
    int32_t strips[2];  // the second -1 if both halves use the first
    Units units;
    int32_t first_end;      // units before this one belong to the first half
    int32_t second_begin;   // units from this one on belong to the second
    int32_t second_window;  // where the second half's window begins

    int32_t strip_count() const { return strips[1] < 0 ? 1 : 2; }
    int32_t unit_count() const { return static_cast<int32_t>(units.size()); }
    int32_t features(int32_t unit) const { return kStripFeatures * strip_count() + unit_count() * unit; }
    // Whether units can change places: each belongs to both halves, or the halves have one strip.
    bool is_unordered() const { return strips[1] < 0 || (second_begin == 0 && first_end >= unit_count()); }
};

using TilePair = std::array<Tile, 2>;

// A row is a strip or, where blocks are taller, the strips of a block row.
class StripPlanBuilder {
  public:
    explicit StripPlanBuilder(const Pattern& pattern)
        : pattern_(pattern),
          unit_(strip_unit(pattern)),
          window_(kStripWindow / unit_),
          row_strips_(std::max(1, pattern.block_rows / kStripFeatures)),
          rows_(static_cast<int32_t>((pattern.out_features - 1) / (row_strips_ * kStripFeatures) + 1)),
          row_parts_(std::max(1, kStripFeatures / pattern.block_rows)),
          col_parts_(std::max(1, unit_ / pattern.block_cols)),
          left_(rows_, UnitSet((pattern.in_features - 1) / unit_ + 1)),
          slots_(rows_) {
        for (int32_t row = 0; row < rows_; ++row) find_units(row);
    }

    StripPlan build() {
        // Two strips cost less than one with twice the units if they share more units than fill a strip.
        const int32_t least_common = row_strips_ > 1 ? window_ : kStripFeatures / unit_ + 1;
        for (int32_t common = window_; common >= least_common; --common)
            for (const int32_t row : longest_first()) add_pairs(row, common);
        for (int32_t row = 0; row < rows_; ++row)
            while (left_[row].size() > window_) add(row, -1, left_[row].take(2 * window_), {}, {});
        add_rests();
        std::stable_sort(tiles_.begin(), tiles_.end(), [&](const Tile& a, const Tile& b) { return before(a, b); });
        pair_tiles();
        std::stable_sort(pairs_.begin(), pairs_.end(),
                         [&](const TilePair& a, const TilePair& b) { return before(a[0], b[0]); });
        StripPlan plan{};
        plan.header.tiles = static_cast<int32_t>(pairs_.size());
        plan.header.groups = row_parts_ * col_parts_;
        plan.header.pieces = 2 * window_;
        for (const TilePair& pair : pairs_)
            for (const Tile& tile : pair) write(tile, plan);
        return plan;
    }

  private:
    void find_units(int32_t row) {
        const int32_t bn = pattern_.block_rows, bk = pattern_.block_cols;
        for (int32_t part = 0; part < row_parts_; ++part) {
            const int32_t block_row = row * row_parts_ + part;
            if (int64_t{block_row} * bn >= pattern_.out_features) break;
            for (int32_t e = pattern_.rows.ptr[block_row]; e < pattern_.rows.ptr[block_row + 1]; ++e) {
                const int32_t first = pattern_.rows.idx[e] * bk;
                for (int32_t k = first; k < first + bk; k += std::min(unit_, bk))
                    add_block(row, k / unit_, part * col_parts_ + k % unit_ / bk, pattern_.rows.slot[e]);
            }
        }
    }

    void add_block(int32_t row, int32_t unit, int32_t part, int32_t slot) {
        const auto [it, is_new] = slots_[row].try_emplace(unit, row_parts_ * col_parts_, -1);
        if (is_new) left_[row].insert(unit);
        it->second[part] = slot;
    }

    std::vector<int32_t> longest_first() const {
        std::vector<int32_t> order(rows_);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return left_[a].size() > left_[b].size(); });
        return order;
    }

    // Tiles of this row and others that have `common` or more units in common with it.
    void add_pairs(int32_t row, int32_t common) {
        while (left_[row].size() >= window_) {
            int32_t partner = -1, most = common - 1;
            for (int32_t other = 0; other < rows_; ++other) {
                if (other == row || left_[other].size() < window_) continue;
                const int32_t count = left_[row].count_common(left_[other]);
                if (count > most) partner = other, most = count;
            }
            if (partner < 0) return;
            const UnitSet &a = left_[row], &b = left_[partner];
            const Units shared = a.take_common(b, common);
            const int32_t rest = window_ - common;
            add(row, partner, shared, without(shared, a).take_private(b, rest),
                without(shared, b).take_private(a, rest));
        }
    }

    static UnitSet without(const Units& units, UnitSet set) {
        for (const int32_t unit : units) set.erase(unit);
        return set;
    }

    // Rows with at most a window of units left, the longest with the shortest.
    void add_rests() {
        std::vector<int32_t> rests;
        for (int32_t row = 0; row < rows_; ++row)
            if (left_[row].size() > 0) rests.push_back(row);
        std::stable_sort(rests.begin(), rests.end(),
                         [&](int32_t a, int32_t b) { return left_[a].size() > left_[b].size(); });
        const int32_t limit = row_strips_ > 1 ? 2 * window_ : room_of_two_strips();
        for (size_t i = 0, end = rests.size(); i < end; ++i) {
            const UnitSet& first = left_[rests[i]];
            const bool paired = i + 1 < end && first.size() + left_[rests[end - 1]].size() <= limit;
            const int32_t second = paired ? rests[--end] : -1;
            if (!paired) {
                add(rests[i], -1, first.take(window_), {}, {});
                continue;
            }
            const UnitSet& other = left_[second];
            const Units shared = first.take_common(other, window_);
            add(rests[i], second, shared, first.take_private(other, window_), other.take_private(first, window_));
        }
    }

    int32_t room_of_two_strips() const { return (kStripTileFeatures - 2 * kStripFeatures) / unit_; }

    // Up to two windows of units for one row, all of them `shared`, or a window for each of two rows.
    void add(int32_t first, int32_t second, const Units& shared, const Units& of_first, const Units& of_second) {
        if (row_strips_ > 1)
            pairs_.push_back(blocks(first, second, shared, of_first, of_second));
        else
            tiles_.push_back(strips(first, second, shared, of_first, of_second));
        remove(first, shared);
        remove(first, of_first);
        if (second < 0) return;
        remove(second, shared);
        remove(second, of_second);
    }

    void remove(int32_t row, const Units& units) {
        for (const int32_t unit : units) left_[row].erase(unit);
    }

    // The shared units lie between those of the first strip alone and those of the second alone.
    Tile strips(int32_t first, int32_t second, const Units& shared, const Units& of_first,
                const Units& of_second) const {
        if (second < 0) return {{first, -1}, shared, window_, window_, window_};
        Tile tile{{first, second}, joined(joined(of_first, shared), of_second), 0, 0, 0};
        tile.first_end = static_cast<int32_t>(of_first.size() + shared.size());
        tile.second_begin = static_cast<int32_t>(of_first.size());
        tile.second_window = std::min(tile.second_begin, room_of_two_strips() - window_);
        return tile;
    }

    TilePair blocks(int32_t first, int32_t second, const Units& shared, const Units& of_first,
                    const Units& of_second) const {
        if (second >= 0) return {block(first, joined(shared, of_first)), block(second, joined(shared, of_second))};
        const auto half = shared.begin() + std::min<int64_t>(window_, static_cast<int64_t>(shared.size()));
        return {block(first, {shared.begin(), half}), block(first, {half, shared.end()})};
    }

    Tile block(int32_t row, const Units& units) const { return {{2 * row, 2 * row + 1}, units, window_, 0, 0}; }

    static Units joined(Units a, const Units& b) {
        a.insert(a.end(), b.begin(), b.end());
        return a;
    }

    // Tiles that run at a time take equally long, and lie close along the longer side of the weight.
    bool before(const Tile& a, const Tile& b) const {
        const int32_t a_features = a.features(unit_), b_features = b.features(unit_);
        if (a_features != b_features) return a_features > b_features;
        if (pattern_.in_features > pattern_.out_features) return a.units[0] < b.units[0];
        return a.strips[0] < b.strips[0];
    }

    // Each tile with that of the next ones with which it has most in common.
    void pair_tiles() {
        constexpr size_t kReach = 128;
        std::vector<bool> used(tiles_.size());
        for (size_t i = 0; i < tiles_.size(); ++i) {
            if (used[i]) continue;
            size_t partner = 0;
            int32_t most = -1;
            for (size_t j = i + 1; j < std::min(i + kReach, tiles_.size()); ++j) {
                if (used[j]) continue;
                const int32_t common = features_in_common(tiles_[i], tiles_[j]);
                if (common > most) partner = j, most = common;
            }
            Tile second{{tiles_[i].strips[0], tiles_[i].strips[1]}, {}, 0, 0, 0};
            if (most >= 0) {
                used[partner] = true;
                second = tiles_[partner];
                align(tiles_[i], second);
            }
            pairs_.push_back({tiles_[i], second});
        }
    }

    int32_t features_in_common(const Tile& a, const Tile& b) const {
        if (a.strip_count() != b.strip_count()) return 0;
        const int32_t strips = (a.strips[0] == b.strips[0]) + (a.strips[1] >= 0 && a.strips[1] == b.strips[1]);
        return strips * kStripFeatures + static_cast<int32_t>(units_in_common(a, b).size()) * unit_;
    }

    static Units units_in_common(const Tile& a, const Tile& b) {
        Units common;
        if (!a.is_unordered() || !b.is_unordered()) return common;
        for (const int32_t unit : a.units)
            if (std::find(b.units.begin(), b.units.end(), unit) != b.units.end()) common.push_back(unit);
        return common;
    }

    // Moves the units that tiles have in common to the same places.
    static void align(Tile& a, Tile& b) {
        if (a.strip_count() != b.strip_count()) return;
        const Units common = units_in_common(a, b);
        for (size_t i = 0; i < common.size(); ++i) {
            std::iter_swap(a.units.begin() + i, std::find(a.units.begin(), a.units.end(), common[i]));
            std::iter_swap(b.units.begin() + i, std::find(b.units.begin(), b.units.end(), common[i]));
        }
    }

    void write(const Tile& tile, StripPlan& plan) const {
        const int32_t second = tile.strips[1] < 0 ? -1 : tile.strips[1] * kStripFeatures;
        plan.tiles.insert(plan.tiles.end(),
                          {tile.strips[0] * kStripFeatures, second, tile.unit_count(), tile.second_window});
        for (int32_t i = 0; i < 2 * window_; ++i)
            plan.units.push_back(i < tile.unit_count() ? tile.units[i] * unit_ : -1);
        const int32_t second_strip = tile.strips[second < 0 ? 0 : 1];
        write_slots(tile, tile.strips[0], 0, 0, std::min(tile.first_end, tile.unit_count()), plan.slots);
        write_slots(tile, second_strip, tile.second_window, tile.second_begin, tile.unit_count(), plan.slots);
    }

    // Those of the units from `begin` to `end`, as seen through a window.
    void write_slots(const Tile& tile, int32_t strip, int32_t window, int32_t begin, int32_t end, Units& to) const {
        for (int32_t i = window; i < window + window_; ++i) {
            if (begin <= i && i < end) {
                const Units& blocks = slots_[strip / row_strips_].at(tile.units[i]);
                to.insert(to.end(), blocks.begin(), blocks.end());
            } else {
                to.insert(to.end(), row_parts_ * col_parts_, -1);
            }
        }
    }

    const Pattern& pattern_;
    int32_t unit_;
    int32_t window_;  // in units
    int32_t row_strips_;
    int32_t rows_;
    int32_t row_parts_;  // blocks in a strip by a unit
    int32_t col_parts_;
    std::vector<UnitSet> left_;                    // of each row: the units in no tile yet
    std::vector<std::map<int32_t, Units>> slots_;  // of each row: a unit's blocks
    std::vector<Tile> tiles_;                      // to be paired
    std::vector<TilePair> pairs_;
};

}  // namespace

StripPlan build_strip_plan(const Pattern& pattern) { return StripPlanBuilder(pattern).build(); }

}  // namespace ts
