// How tiles of gradients of W are shared out: all tokens of each tile once, and partial sums in places of
// their own, of which the kernel that adds them reads all and no others.
#include "common/sdd_schedule.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

[[noreturn]] void fail(const char* what, int line) {
    std::fprintf(stderr, "line %d: %s\n", line, what);
    std::exit(1);
}
#define CHECK(condition) \
    if (!(condition)) fail(#condition, __LINE__)

struct Case {
    int tiles, steps, teams, team_size;
    bool may_split;
};

// The most steps that a CTA takes.
template <int kStepTime>
int walk(const Case& given) {
    const auto [tiles, steps, teams, team_size, may_split] = given;
    const ts::SddSchedule<kStepTime> schedule(tiles, steps, teams, team_size, may_split);
    std::vector<std::vector<int>> seen(tiles, std::vector<int>(steps)), places(tiles);
    std::vector<bool> taken(2 * teams * team_size);  // as the workspace has room
    int longest = 0;
    for (int cta = 0; cta < teams * team_size; ++cta) {
        int own = 0;
        for (int index = cta / team_size; index < schedule.size(); index += teams) {
            const ts::SddWork work = schedule.work(index, cta % team_size);
            const ts::SddWork first = schedule.work(index, 0);  // a team's CTAs load for each other
            CHECK(work.first_step == first.first_step && work.last_step == first.last_step);
            CHECK(0 <= work.tile && work.tile < tiles);
            CHECK(0 <= work.first_step && work.first_step <= work.last_step && work.last_step <= steps);
            if (!work.exists) continue;
            own += work.last_step - work.first_step;
            for (int step = work.first_step; step < work.last_step; ++step) ++seen[work.tile][step];
            if (work.partial < 0) {
                CHECK(work.last_step - work.first_step == steps);
                continue;
            }
            CHECK(may_split && work.partial < static_cast<int>(taken.size()) && !taken[work.partial]);
            taken[work.partial] = true;
            places[work.tile].push_back(work.partial);
        }
        longest = std::max(longest, own);
    }
    for (const std::vector<int>& tile : seen)
        for (const int times : tile) CHECK(times == 1);
    for (int tile = 0; tile < tiles; ++tile) {
        std::vector<int> read;
        if (schedule.split_tiles() > 0 && tile >= schedule.first_split()) {
            const ts::SddPartials partials = schedule.partials(tile - schedule.first_split());
            for (int number = 0; number < partials.count(); ++number) read.push_back(partials.at(number));
        }
        std::sort(read.begin(), read.end());
        std::sort(places[tile].begin(), places[tile].end());
        CHECK(read == places[tile]);
    }
    return longest;
}

void check(const Case& given) {
    walk<1>(given);
    walk<3>(given);
    walk<11>(given);
    walk<26>(given);
}

void test_all_tokens_of_all_tiles_once() {
    for (const int teams : {1, 2, 7, 66, 132})
        for (const int team_size : {1, 2})
            for (const int steps : {0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 24, 31, 32, 64, 100, 257})
                for (const int tiles :
                     {1, 2, 3, 5, 8, 13, 24, 28, 43, 64, 66, 67, 89, 131, 132, 133, 150, 265})
                    for (const bool may_split : {false, true})
                        check({tiles, steps, teams, team_size, may_split});
}

// 24 tiles for 132 CTAs, as 768 -> 3072 features have at density .25 in blocks of 16.
void test_few_tiles_are_split_where_their_steps_take_long() {
    CHECK(walk<1>({24, 8, 132, 1, true}) == 8);
    CHECK(walk<3>({24, 8, 132, 1, true}) == 2);
    CHECK(walk<26>({24, 8, 132, 1, true}) == 2);
    CHECK(walk<1>({24, 32, 132, 1, true}) < 16);
    CHECK(walk<3>({24, 8, 132, 1, false}) == 8);
    CHECK(walk<3>({62, 12, 132, 1, true}) == 6);
    CHECK(walk<1>({132, 64, 132, 1, true}) == 64);
}

}  // namespace

int main() {
    test_all_tokens_of_all_tiles_once();
    test_few_tiles_are_split_where_their_steps_take_long();
    std::puts("ok");
}
