// y = relu(x W^T + bias) on the CPU, where W [64, 64] keeps three of its four 32 x 32 blocks.

#include <tilesparse/tilesparse.hpp>

#include <cstdio>
#include <vector>

int main() {
    // Block row 0 keeps columns 0 and 1, block row 1 column 1; values are stored in that order.
    const auto pattern = tilesparse::Pattern::from_mask({1, 1, 0, 1}, {64, 64}, {32, 32});
    const int tokens = 5;
    const std::vector<float> x(tokens * 64, 1.0f), values(pattern.values_size(), 0.5f), bias(64, -20.0f);
    std::vector<float> y(tokens * 64);

    tilesparse::Product product(tilesparse::Op::dds_nt, pattern, tokens);
    product.x(x).values(values).bias(bias).activation(tilesparse::Activation::relu).y(y).run();

    // 64 inputs of 0.5 less 20 in the first 32 outputs; 32 of them, cut off at 0, in the others.
    std::printf("tilesparse %s: %g and %g, expected 12 and 0\n", ts_version(), y.front(), y.back());
    return y.front() == 12.0f && y.back() == 0.0f ? 0 : 1;
}
