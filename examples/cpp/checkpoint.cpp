// Products with the block-sparse layers of a checkpoint that tilesparse.save has written, on the CPU:
//
//     checkpoint FOLDER LAYER... < x > y
//
// x [tokens, in_features] and y [tokens, out_features] are numbers in the dtype of the layers, row by row.
// Several layers follow each other, with a ReLU between two of them. Whatever is wrong with the checkpoint is
// said in a sentence, and the exit code is 1.

#include "checkpoint.h"

#include <cstdio>
#include <iostream>
#include <iterator>
#include <optional>

namespace {

Bytes forward(const Layer& layer, const Bytes& x, bool relu) {
    const auto [out_features, in_features] = layer.pattern.shape();
    const size_t itemsize = tilesparse::size_of(layer.dtype);
    const size_t row = static_cast<size_t>(in_features) * itemsize;
    if (row == 0 || x.size() % row != 0)
        fail("x must be rows of " + std::to_string(row) + " bytes, got " + std::to_string(x.size()));
    const size_t tokens = x.size() / row;
    Bytes y(tokens * static_cast<size_t>(out_features) * itemsize);

    tilesparse::Product product(tilesparse::Op::dds_nt, layer.pattern, static_cast<int64_t>(tokens));
    product.x(array(x, layer.dtype)).values(array(layer.values, layer.values_dtype)).y(array(y, layer.dtype));
    if (!layer.bias.empty()) product.bias(array(layer.bias, layer.dtype));
    if (!layer.metadata.empty()) product.metadata(layer.metadata);
    if (!layer.scales.empty()) product.scales(layer.scales);
    if (relu) product.activation(tilesparse::Activation::relu);
    product.run();
    return y;
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 3) {
        std::fprintf(stderr, "usage: %s FOLDER LAYER... < x > y\n", arguments[0]);
        return 2;
    }
    try {
        const Checkpoint checkpoint(arguments[1]);
        Bytes values{std::istreambuf_iterator<char>(std::cin), {}};
        std::optional<tilesparse::Dtype> dtype;
        for (int i = 2; i < count; ++i) {
            named("layer '" + std::string(arguments[i]) + "'", [&] {
                const Layer layer = read_layer(checkpoint, arguments[i]);
                if (dtype.value_or(layer.dtype) != layer.dtype)
                    fail("dtype must be that of the layer before");
                dtype = layer.dtype;
                values = forward(layer, values, i + 1 < count);
            });
        }
        std::cout.write(values.data(), static_cast<std::streamsize>(values.size()));
        return std::cout.flush() ? 0 : 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", arguments[0], error.what());
        return 1;
    }
}
