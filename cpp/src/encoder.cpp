#include "encoder.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "checks.h"
#include "cpu/cpu.h"
#include "cpu/encoder_layers.h"
#include "descriptors.h"
#include "device.h"
#include "error.h"
#include "operands.h"
#include "product.h"

namespace ts {
namespace {

constexpr int64_t kMostLayers = 1024, kMostHeads = 1 << 16;
constexpr int32_t kMostHeadFeatures = 256;

// The fields of a layer have its name before theirs.
template <class Body>
void named(const std::string& name, const Body& body) {
    try {
        body();
    } catch (const Error& error) {
        throw Error(error.status(), name + error.what());
    }
}

ts_matmul_desc product_of(const ts_encoder_weight& weight, const ts_encoder_desc& desc) {
    ts_matmul_desc product{};
    product.struct_size = sizeof product;
    product.op = TS_DDS_NT;
    product.kernel = desc.kernel;
    product.pattern = weight.pattern;
    product.x.dtype = TS_INT8;
    product.x.granularity = TS_SCALES_PER_TOKEN;
    product.y.dtype = TS_FLOAT32;
    product.values = weight.values;
    product.bias.data = const_cast<float*>(weight.bias);
    product.prepacked = weight.prepacked;
    std::copy_n(desc.prefer, sizeof desc.prefer, product.prefer);
    return product;
}

// A checked encoder, and all that it reads.
class Checked {
  public:
    explicit Checked(const ts_encoder_desc& desc) : desc_(desc) {
        if (desc.device == TS_CUDA) fail(TS_UNSUPPORTED, "device must be 0 (TS_CPU) for an encoder, got 1");
        check_enum<int32_t>(desc.device, 1, "device");
        require(desc.dtype == TS_FLOAT32 || desc.dtype == TS_BFLOAT16, "dtype must be ", TS_FLOAT32, " or ",
                TS_BFLOAT16, ", got ", desc.dtype);
        encoder_.dtype = check_dtype(desc.dtype, kActivationDTypes, "dtype");
        check_extent(desc.tokens, "tokens", DeviceType::cpu);
        check_extent(desc.sentences, "sentences", DeviceType::cpu);
        encoder_.tokens = desc.tokens;
        encoder_.sentences = desc.sentences;
        check_pointer(desc.offsets, "offsets");
        check_offsets(desc.offsets, desc.sentences, desc.tokens, "offsets");
        encoder_.offsets = desc.offsets;
        for (int64_t i = 0; i < desc.sentences; ++i)
            longest_ = std::max(longest_, desc.offsets[i + 1] - desc.offsets[i]);
        require(desc.layer_count >= 1 && desc.layer_count <= kMostLayers, "layer_count must be 1 to ",
                kMostLayers, ", got ", desc.layer_count);
        check_pointer(desc.layers, "layers");
        encoder_.layers.reserve(desc.layer_count);
        read_.reserve(4 * desc.layer_count);
        for (int64_t i = 0; i < desc.layer_count; ++i) {
            const std::string name = "layers[" + std::to_string(i) + "]";
            const ts_encoder_layer layer = read_struct(desc.layers[i], name.c_str());
            named(name + ".", [&] { add(layer); });
        }
        choose_instructions();
        encoder_.x = check_rows(&desc.x, desc.tokens, encoder_.hidden, "x");
        encoder_.y = check_rows(&desc.y, desc.tokens, encoder_.hidden, "y");
    }

    const cpu::Encoder& encoder() const { return encoder_; }
    const cpu::InstructionSet& instructions() const { return *set_; }

    // Checks memory that is written.
    void check_memory(const void* workspace, size_t bytes) const {
        const auto rows = [&](const Matrix& matrix, const char* name) -> Operand {
            return {name, check_operand(matrix, encoder_.tokens, encoder_.hidden, encoder_.dtype, name,
                                        DeviceType::cpu)};
        };
        const Operand x = rows(encoder_.x, "x"), y = rows(encoder_.y, "y"),
                      scratch = area("workspace", workspace, bytes);
        if (encoder_.x.data != encoder_.y.data || encoder_.x.ld != encoder_.y.ld) check_apart(x, y);
        for (const Operand* one : {&x, &y}) check_apart(*one, scratch);
        for (const Operand* written : {&y, &scratch}) {
            check_apart(area("offsets", desc_.offsets, (desc_.sentences + 1) * sizeof(int32_t)), *written);
            for (const auto& [name, operand] : arrays_) named(name, [&] { check_apart(operand, *written); });
            for (const Product& product : read_)
                named(product.name, [&] { product.operands.check_written(*written); });
        }
    }

  private:
    struct Product {
        std::string name;
        Operands operands;
        ts_matmul_desc desc;
        Problem problem;
    };

    // The instructions of the kernel that the first product would run on.
    void choose_instructions() {
        const Choice choice = choose(read_.front().problem, cpu_device(), wish_of(read_.front().desc));
        set_ = cpu::instruction_set_of(*choice.kernel);
        require(set_ != nullptr, "kernel must be one for x of int8, got ", choice.number);
        for (const Product& product : read_)
            named(product.name, [&] { check_read(product.desc, product.problem, choice); });
    }

    void add(const ts_encoder_layer& from) {
        const auto check = [](int32_t value, int32_t least, int32_t most, const char* name) {
            require(value >= least && value <= most, name, " must be ", least, " to ", most, ", got ", value);
            return value;
        };
        cpu::EncoderLayer layer{};
        layer.norm_first = check_enum<int32_t>(from.norm_first, 2, "norm_first") == 1;
        layer.gated = check_enum<int32_t>(from.gated, 2, "gated") == 1;
        layer.heads = check(from.heads, 1, kMostHeads, "heads");
        layer.head_features = check(from.head_features, 16, kMostHeadFeatures, "head_features");
        require(from.head_features % 16 == 0, "head_features must be a multiple of 16, got ",
                from.head_features);
        layer.activation = check_enum<Activation>(from.activation, 4, "activation");
        layer.window = check(from.window, 0, kMaxExtent, "window");
        require(std::isfinite(from.scale), "scale must be finite, got ", from.scale);
        layer.scale = from.scale;
        check_enum<int32_t>(from.reserved, 1, "reserved");
        layer.qkv = weight(from.qkv, "qkv.");
        layer.output = weight(from.output, "output.");
        layer.up = weight(from.up, "up.");
        layer.down = weight(from.down, "down.");
        if (!layer.gated) layer.up.activation = layer.activation;
        check_sizes(layer);
        layer.attention_norm = norm(from.attention_norm, "attention_norm.", layer.norm_first);
        layer.mlp_norm = norm(from.mlp_norm, "mlp_norm.", false);
        require(from.rotary == nullptr || from.head_features % 32 == 0,
                "head_features must be a multiple of 32 where rotary is given, got ", from.head_features);
        layer.rotary = from.rotary;
        layer.position_bias = from.position_bias;
        layer.positions = from.positions;
        if (from.rotary != nullptr || from.position_bias != nullptr)
            check(from.positions, std::max(longest_, 1), 1 << 24, "positions");
        add_array(from.rotary, "rotary", int64_t{from.positions} * from.head_features);
        add_array(from.position_bias, "position_bias", layer.heads * (2 * int64_t{from.positions} - 1));
        encoder_.layers.push_back(layer);
    }

    void check_sizes(const cpu::EncoderLayer& layer) {
        if (encoder_.layers.empty()) encoder_.hidden = layer.qkv.pattern.in_features;
        const int64_t hidden = encoder_.hidden, inner = layer.inner();
        const auto check = [](const Problem& of, int64_t out, int64_t in, const char* name) {
            require(of.pattern.in_features == in, name, ".pattern.in_features must be ", in, ", got ",
                    of.pattern.in_features);
            require(of.pattern.out_features == out, name, ".pattern.out_features must be ", out, ", got ",
                    of.pattern.out_features);
        };
        require(hidden > 0, "qkv.pattern.in_features must not be 0");
        require(inner > 0, "down.pattern.in_features must not be 0");
        check(layer.qkv, 3 * layer.attended(), hidden, "qkv");
        check(layer.output, hidden, layer.attended(), "output");
        check(layer.down, hidden, inner, "down");
        check(layer.up, layer.gated ? 2 * inner : inner, hidden, "up");
    }

    // A weight as a product without tokens.
    Problem weight(const ts_encoder_weight& from, const char* name) {
        Problem problem{};
        const ts_matmul_desc product = product_of(from, desc_);
        named(name, [&] {
            require(from.values.storage == TS_STORAGE_DENSE, "values.storage must be 0, got ",
                    from.values.storage);
            problem = check_problem(product);
            read_.push_back({layer_name() + name, Operands(problem, product), product, problem});
        });
        problem.x.layout = problem.y.layout = Layout::row_major;
        return problem;
    }

    cpu::EncoderNorm norm(const ts_encoder_norm& from, const char* name, bool optional) {
        named(name, [&] {
            check_enum<int32_t>(from.reserved, 1, "reserved");
            require(from.weight != nullptr || optional, "weight must not be null");
            if (from.weight == nullptr)
                return require(from.bias == nullptr, "bias must be null without weight");
            require(from.epsilon > 0 && std::isfinite(from.epsilon),
                    "epsilon must be a finite number above 0, got ", from.epsilon);
        });
        add_array(from.weight, std::string(name) + "weight", encoder_.hidden);
        add_array(from.bias, std::string(name) + "bias", encoder_.hidden);
        return {from.weight, from.bias, from.epsilon};
    }

    void add_array(const float* data, const std::string& name, int64_t count) {
        if (data == nullptr) return;
        named(name, [&] {
            check_aligned(data, sizeof(float), "");
            arrays_.emplace_back(layer_name() + name, area("", data, count * sizeof(float)));
        });
    }

    std::string layer_name() const { return "layers[" + std::to_string(encoder_.layers.size()) + "]."; }

    const ts_encoder_desc& desc_;
    cpu::Encoder encoder_{};
    const cpu::InstructionSet* set_ = nullptr;
    int32_t longest_ = 0;
    std::vector<Product> read_;
    std::vector<std::pair<std::string, Operand>> arrays_;
};

}  // namespace

size_t encoder_workspace_size(const ts_encoder_desc& desc) {
    const Checked checked(desc);
    return cpu::encoder_workspace_size(checked.instructions(), checked.encoder(), cpu_device().properties);
}

void run_encoder(const ts_encoder_desc& desc, void* workspace, size_t bytes) {
    const Checked checked(desc);
    const Device& device = cpu_device().properties;
    const size_t needed = cpu::encoder_workspace_size(checked.instructions(), checked.encoder(), device);
    check_workspace(workspace, bytes, needed, DeviceType::cpu, "this encoder");
    checked.check_memory(workspace, needed);
    cpu::run_encoder(checked.instructions(), checked.encoder(), device, workspace);
}

}  // namespace ts
