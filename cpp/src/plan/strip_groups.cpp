// Plans by strips of several weights: those of each, one after another.
#include <cstddef>

#include "plan/strip_builder.h"

namespace ts {
namespace {

Pattern weight_of(const Pattern& pattern, int32_t group) {
    Pattern one = pattern;
    one.out_features = pattern.group_out_features();
    one.groups = 1;
    one.rows.ptr += one.out_features / pattern.block_rows * group;
    return one;
}

// Numbers the features of y from the first of all weights on, in the tiles of one.
void move_tiles(StripPlan& plan, int32_t features) {
    for (size_t tile = 0; tile < plan.tiles.size() / 4; ++tile) {
        int32_t* const words = plan.tiles.data() + 4 * tile;
        const bool swapped = words[3] < 0;
        for (int32_t* strip = words; !swapped && strip < words + 2; ++strip)
            if (*strip >= 0) *strip += features;
        int32_t* const units = plan.units.data() + plan.header.units * tile;
        for (int32_t i = 0; swapped && i < words[2]; ++i) units[i] += features;
    }
}

}  // namespace

StripPlan build_strip_plan(const Pattern& pattern) {
    if (pattern.groups == 1) return build_strip_plan_of_one(pattern);
    StripPlan all{};
    for (int32_t group = 0; group < pattern.groups; ++group) {
        const Pattern weight = weight_of(pattern, group);
        StripPlan one = build_strip_plan_of_one(weight);
        move_tiles(one, static_cast<int32_t>(weight.out_features) * group);
        all.starts.push_back(all.header.tiles);
        one.header.tiles += all.header.tiles;
        all.header = one.header;
        all.tiles.insert(all.tiles.end(), one.tiles.begin(), one.tiles.end());
        all.units.insert(all.units.end(), one.units.begin(), one.units.end());
        all.slots.insert(all.slots.end(), one.slots.begin(), one.slots.end());
    }
    all.starts.push_back(all.header.tiles);
    return all;
}

}  // namespace ts
