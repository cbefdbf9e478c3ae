// Layers of encoders that are described once and run many times.
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support.h"

namespace bindings {
namespace {

// The owner keeps all memory that is named.
class Encoder {
  public:
    // Begins a layer. What it has is added by the next calls.
    void add_layer(int32_t heads, int32_t head_features, float scale, int32_t activation, bool norm_first,
                   bool gated, int32_t window, int32_t positions, uintptr_t rotary, uintptr_t position_bias) {
        Layer& layer = layers_.emplace_back();
        layer.desc.heads = heads;
        layer.desc.head_features = head_features;
        layer.desc.scale = scale;
        layer.desc.activation = activation;
        layer.desc.norm_first = norm_first;
        layer.desc.gated = gated;
        layer.desc.window = window;
        layer.desc.positions = positions;
        layer.desc.rotary = pointer<float>(rotary);
        layer.desc.position_bias = pointer<float>(position_bias);
        pointers_.push_back(&layer.desc);
    }

    // `place`: 0 to 3 for qkv, output, up and down.
    void set_weight(int32_t place, const ts_pattern& pattern, uintptr_t values, uintptr_t scales,
                    uintptr_t bias) {
        Layer& layer = last();
        if (place < 0 || place > 3) throw nb::value_error("place must be 0 to 3");
        layer.patterns[place] = pattern;
        ts_encoder_weight& weight = *layer.weights()[place];
        weight.pattern = &layer.patterns[place];
        weight.values.data = pointer<void>(values);
        weight.values.dtype = TS_INT8;
        weight.values.granularity = TS_SCALES_PER_FEATURE;
        weight.values.scales = pointer<float>(scales);
        weight.bias = pointer<float>(bias);
    }

    // `place`: 0 for attention_norm, 1 for mlp_norm.
    void set_norm(int32_t place, uintptr_t weight, uintptr_t bias, float epsilon) {
        ts_encoder_norm& norm = place == 0 ? last().desc.attention_norm : last().desc.mlp_norm;
        norm = {pointer<float>(weight), pointer<float>(bias), epsilon, 0};
    }

    // Keeps copies of all values in the order in which the kernel multiplies them that products of int8 run
    // on by default, if it has one. Calls with its instructions read them from then on, until this is called
    // again.
    void prepack() {
        for (Layer& layer : layers_)
            for (int place = 0; place < 4; ++place) pack(*layer.weights()[place], layer.packed[place]);
    }

    // `kernel` and `prefer`: as in ts_encoder_desc.
    size_t workspace_size(int32_t dtype, int64_t tokens, int64_t sentences, uintptr_t offsets, int32_t kernel,
                          const std::string& prefer) const {
        const ts_encoder_desc desc = described(dtype, tokens, sentences, offsets, kernel, prefer);
        size_t bytes = 0;
        check(ts_encoder_workspace_size(&desc, &bytes));
        return bytes;
    }

    // x and y: the address of a matrix, and the elements from one row to the next.
    // Returns 0, or the bytes of workspace that are needed where there are fewer.
    size_t run(int32_t dtype, int64_t tokens, int64_t sentences, uintptr_t offsets, int32_t kernel,
               const std::string& prefer, std::array<int64_t, 2> x, std::array<int64_t, 2> y,
               uintptr_t workspace, size_t workspace_bytes) const {
        ts_encoder_desc desc = described(dtype, tokens, sentences, offsets, kernel, prefer);
        desc.x = {pointer<void>(static_cast<uintptr_t>(x[0])), x[1], TS_ROW_MAJOR, 0};
        desc.y = {pointer<void>(static_cast<uintptr_t>(y[0])), y[1], TS_ROW_MAJOR, 0};
        ts_status_t status;
        {
            const nb::gil_scoped_release release;
            status = ts_encoder(&desc, pointer<void>(workspace), workspace_bytes, nullptr);
        }
        if (status == TS_WORKSPACE_TOO_SMALL) check(ts_encoder_workspace_size(&desc, &workspace_bytes));
        if (status == TS_WORKSPACE_TOO_SMALL) return workspace_bytes;
        check(status);
        return 0;
    }

  private:
    static constexpr size_t kAlignment = 256;

    struct Layer {
        ts_encoder_layer desc = make<ts_encoder_layer>();
        ts_pattern patterns[4] = {};
        std::vector<std::byte> packed[4];

        std::array<ts_encoder_weight*, 4> weights() {
            return {&desc.qkv, &desc.output, &desc.up, &desc.down};
        }
    };

    static void pack(ts_encoder_weight& weight, std::vector<std::byte>& memory) {
        auto product = make<ts_matmul_desc>();
        product.pattern = weight.pattern;
        product.x.dtype = TS_INT8;
        product.x.granularity = TS_SCALES_PER_TOKEN;
        product.y.dtype = TS_FLOAT32;
        product.values = weight.values;
        size_t bytes = 0;
        check(ts_values_prepacked_size(&product, &bytes));
        weight.prepacked = {};
        if (bytes == 0) return memory.clear();
        memory.resize(bytes + kAlignment);
        void* area = memory.data();
        size_t room = memory.size();
        std::align(kAlignment, bytes, area, room);
        check(ts_values_prepack(&product, area, bytes, nullptr));
        weight.prepacked = {area, bytes, 0};
    }

    Layer& last() {
        if (layers_.empty()) throw nb::value_error("add_layer must come first");
        return layers_.back();
    }

    ts_encoder_desc described(int32_t dtype, int64_t tokens, int64_t sentences, uintptr_t offsets,
                              int32_t kernel, const std::string& prefer) const {
        auto desc = make<ts_encoder_desc>();
        desc.device = TS_CPU;
        desc.dtype = dtype;
        desc.kernel = kernel;
        copy_text(desc.prefer, prefer, "prefer");
        desc.tokens = tokens;
        desc.sentences = sentences;
        desc.offsets = pointer<int32_t>(offsets);
        desc.layer_count = static_cast<int64_t>(pointers_.size());
        desc.layers = pointers_.data();
        return desc;
    }

    std::deque<Layer> layers_;  // which stay where they are
    std::vector<const ts_encoder_layer*> pointers_;
};

}  // namespace

void bind_encoder(nb::module_& m) {
    nb::class_<Encoder>(m, "Encoder")
        .def(nb::init<>())
        .def("add_layer", &Encoder::add_layer, "heads"_a, "head_features"_a, "scale"_a, "activation"_a,
             "norm_first"_a, "gated"_a, "window"_a, "positions"_a, "rotary"_a, "position_bias"_a)
        .def("set_weight", &Encoder::set_weight, "place"_a, "pattern"_a, "values"_a, "scales"_a, "bias"_a)
        .def("set_norm", &Encoder::set_norm, "place"_a, "weight"_a, "bias"_a, "epsilon"_a)
        .def("prepack", &Encoder::prepack)
        .def("workspace_size", &Encoder::workspace_size, "dtype"_a, "tokens"_a, "sentences"_a, "offsets"_a,
             "kernel"_a, "prefer"_a)
        .def("run", &Encoder::run, "dtype"_a, "tokens"_a, "sentences"_a, "offsets"_a, "kernel"_a, "prefer"_a,
             "x"_a, "y"_a, "workspace"_a, "workspace_bytes"_a);
}

}  // namespace bindings
