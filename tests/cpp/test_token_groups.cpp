// How kernels find the tokens of a group: every token of it in one tile, no tile in two groups, and nothing
// out of the matrix however broken the offsets are. Kernels count tiles as lanes_count does, in a warp.
#include "common/token_groups.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

constexpr int kLanes = 32;

[[noreturn]] void fail(const char* what, int line) {
    std::fprintf(stderr, "line %d: %s\n", line, what);
    std::exit(1);
}
#define CHECK(condition) \
    if (!(condition)) fail(#condition, __LINE__)

std::vector<int> lanes_count(const ts::TileCount& count) {
    const int groups = count.groups.count, own = (groups + kLanes - 1) / kLanes;
    std::vector<int> before(groups + 1, -1);
    before[0] = 0;
    int sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
        const int first = std::min(lane * own, groups), last = std::min(first + own, groups);
        const int next = std::min(sum + count.add(0, first, last, nullptr), count.most);
        count.add(sum, first, last, before.data());
        sum = next;
    }
    return before;
}

// The tokens of each tile of each group lie inside; `seen` counts them.
std::vector<int> walk(const std::vector<int32_t>& offsets, int tokens, int tile_tokens) {
    const int groups = static_cast<int>(offsets.size()) - 1;
    const auto most = static_cast<int>(ts::most_token_tiles(tokens, groups, tile_tokens));
    const ts::TokenGroups token_groups{offsets.data(), groups, tokens};
    const std::vector<int> before = lanes_count({token_groups, tile_tokens, most});
    CHECK(before[groups] <= most);
    std::vector<int> seen(tokens);
    for (int tile = 0; tile < before[groups]; ++tile) {
        const int group = ts::group_of_tile(before.data(), groups, tile);
        const ts::TokenSpan span = token_groups.span(group);
        const int first = span.first + (tile - before[group]) * tile_tokens;
        CHECK(0 <= span.first && span.first <= first && first < span.last && span.last <= tokens);
        for (int token = first; token < std::min(first + tile_tokens, span.last); ++token) ++seen[token];
    }
    return seen;
}

void check_each_token_once(const std::vector<int32_t>& offsets) {
    for (const int tile_tokens : {32, 128, 192, 256})
        for (const int count : walk(offsets, offsets.back(), tile_tokens)) CHECK(count == 1);
}

}  // namespace

int main() {
    check_each_token_once({0, 1});
    check_each_token_once({0, 0});
    check_each_token_once({0, 0, 0, 1000, 1000});
    check_each_token_once({0, 128, 256, 384, 384, 512});
    std::mt19937 random(0);
    for (const int groups : {1, 2, 31, 32, 33, 128, 512, 1023, 1024}) {
        for (const int most : {1, 40, 300}) {
            std::vector<int32_t> offsets{0};
            for (int group = 0; group < groups; ++group) {
                const bool empty = random() % 3 == 0;
                offsets.push_back(offsets.back() + (empty ? 0 : static_cast<int>(random() % most)));
            }
            check_each_token_once(offsets);
        }
        for (const int tokens : {0, 1, 1000, 100000}) {
            std::vector<int32_t> broken(groups + 1);
            for (int32_t& offset : broken) offset = static_cast<int32_t>(random());
            for (int32_t& offset : broken)
                if (random() % 2 == 0) offset = static_cast<int32_t>(random() % (tokens + 1));
            walk(broken, tokens, 32);
            walk(std::vector<int32_t>(groups + 1, INT32_MIN), tokens, 32);
            walk(std::vector<int32_t>(groups + 1, INT32_MAX), tokens, 32);
        }
    }
    std::puts("ok");
}
