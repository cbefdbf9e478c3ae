// Element-wise functions of activations: their checks, and what the host computes.
#include "activations.h"

#include <bit>
#include <cmath>
#include <cstddef>

#include "abi.h"
#include "checks.h"
#include "cpu/steps.h"
#include "descriptors.h"
#include "device.h"
#include "error.h"
#include "threads.h"

namespace ts {

ActivationGradient check_activation_gradient(int32_t dtype, int32_t activation, int64_t tokens,
                                             int64_t features) {
    ActivationGradient gradient{};
    gradient.dtype = check_dtype(dtype, kActivationDTypes, "dtype");
    if (gradient.dtype == DType::float64)
        fail(TS_UNSUPPORTED, "dtype must not be 0: no kernel computes this in float64");
    require(activation >= TS_RELU && activation <= TS_SILU, "activation must be 1 to 3, got ", activation);
    gradient.activation = static_cast<Activation>(activation);
    check_extent(tokens, "tokens", DeviceType::cuda);
    check_features(features, 16, "features", "16", DeviceType::cuda);
    check_elements(tokens, features, "z");
    gradient.tokens = tokens;
    gradient.features = features;
    return gradient;
}

Matrix check_rows(const ts_matrix* source, int64_t tokens, int64_t features, const char* name) {
    check_pointer(source, name);
    require(source->reserved == 0, name, ".reserved must be 0, got ", source->reserved);
    const Matrix matrix = check_matrix(*source, tokens, features, name);
    require(matrix.layout == Layout::row_major, name, ".layout must be ", TS_ROW_MAJOR, ", got ",
            source->layout);
    return matrix;
}

Matrix check_gate_matrix(const Gate& gate, const ts_matrix* source, const char* name) {
    return check_rows(source, gate.tokens, gate.features, name);
}

Gate check_gate(int32_t dtype, int32_t activation, int64_t tokens, int64_t features, const ts_matrix* source,
                const ts_matrix* factor) {
    Gate gate{};
    gate.dtype = check_dtype(dtype, kActivationDTypes, "dtype");
    if (gate.dtype == DType::float64)
        fail(TS_UNSUPPORTED, "dtype must not be 0: no kernel computes this in float64");
    gate.activation = check_enum<Activation>(activation, TS_SILU + 1, "activation");
    check_extent(tokens, "tokens", DeviceType::cuda);
    check_features(features, 16, "features", "16", DeviceType::cuda);
    gate.tokens = tokens;
    gate.features = features;
    gate.gate = check_gate_matrix(gate, source, "gate");
    gate.factor = check_gate_matrix(gate, factor, "factor");
    return gate;
}

Quantization check_quantization(int32_t device, int32_t dtype, int32_t quantized_dtype, int64_t tokens,
                                int64_t features, const ts_matrix* x, const ts_matrix* quantized) {
    Quantization of{};
    of.device = check_device_type(device);
    of.dtype = check_dtype(dtype, kActivationDTypes, "dtype");
    if (of.dtype == DType::float64)
        fail(TS_UNSUPPORTED, "dtype must not be ", TS_FLOAT64, ": float64 is not quantized");
    require(quantized_dtype == TS_INT8 || quantized_dtype == TS_FLOAT8_E4M3FN, "quantized_dtype must be ",
            TS_INT8, " or ", TS_FLOAT8_E4M3FN, ", got ", quantized_dtype);
    of.quantized_dtype = static_cast<DType>(quantized_dtype - 1);
    check_extent(tokens, "tokens", of.device);
    check_features(features, 16, "features", "16", of.device);
    of.tokens = tokens;
    of.features = features;
    of.x = check_rows(x, tokens, features, "x");
    of.quantized = check_rows(quantized, tokens, features, "quantized");
    return of;
}

Quantization check_group_quantization(int32_t device, int32_t dtype, int32_t quantized_dtype, int64_t tokens,
                                      int64_t features, const ts_matrix* x, const ts_matrix* quantized,
                                      int64_t scales_ld) {
    Quantization of = check_quantization(device, dtype, quantized_dtype, tokens, features, x, quantized);
    require(of.quantized_dtype == DType::float8_e4m3fn, "quantized_dtype must be ", TS_FLOAT8_E4M3FN,
            " for scales of groups, got ", quantized_dtype);
    check_features(features, kScaleGroup, "features", "128", of.device);
    check_scales_ld(scales_ld, tokens, "scales_ld");
    of.scales_ld = scales_ld;
    return of;
}

GroupSums check_group_sums(int32_t device, int32_t dtype, int32_t result_dtype, int64_t tokens,
                           int64_t features, int64_t groups, const ts_matrix* y) {
    GroupSums of{};
    of.device = check_device_type(device);
    of.dtype = check_dtype(dtype, kActivationDTypes, "dtype");
    of.result_dtype = check_dtype(result_dtype, kActivationDTypes, "result_dtype");
    const bool has_16_bits = element_size(of.dtype) == 2;
    require(of.result_dtype == of.dtype || (has_16_bits && of.result_dtype == DType::float32),
            "result_dtype must be dtype, ", dtype, has_16_bits ? ", or 2, float32" : "", ", got ",
            result_dtype);
    check_extent(tokens, "tokens", of.device);
    check_features(features, 16, "features", "16", of.device);
    require(groups >= 1 && groups <= kMaxGroups, "groups must be 1 to ", kMaxGroups, ", got ", groups);
    of.tokens = tokens;
    of.features = features;
    of.groups = groups;
    of.y = check_rows(y, tokens, features, "y");
    return of;
}
namespace {

// Magnitudes are compared as the bits of float32, in which a NaN is above infinity.
constexpr uint32_t kInfinity = 0x7f800000;

void quantize_on_host(const Quantization& of) {
    const cpu::Steps& steps = cpu::widest().steps[static_cast<int>(of.dtype)];
    const bool to_float8 = of.quantized_dtype == DType::float8_e4m3fn;
    const auto* const x = static_cast<const std::byte*>(of.x.data);
    auto* const quantized = static_cast<uint8_t*>(of.quantized.data);
    const int64_t width = of.in_groups() ? kScaleGroup : of.features;  // of what has one scale
    const int64_t groups = of.in_groups() ? of.features / width : 1;
    for_each(of.tokens, [&](int64_t token) {
        for (int64_t group = 0; group < groups; ++group) {
            const std::byte* const from = x + (token * of.x.ld + group * width) * element_size(of.dtype);
            const uint32_t most = steps.largest_magnitude(from, width);
            const bool finite = most < kInfinity;
            const float scale = std::fmax(
                std::bit_cast<float>(most) / quantize::largest_of(of.quantized_dtype), quantize::kLeastScale);
            of.scales[group * of.scales_ld + token] = finite ? scale : std::nanf("");
            steps.quantize({from, width, to_float8, finite ? 1.0f / scale : 0.0f,
                            quantized + token * of.quantized.ld + group * width});
        }
    });
}

}  // namespace

void quantize_activations(const Quantization& of, void* stream) {
    if (of.device == DeviceType::cpu) return quantize_on_host(of);
#ifdef TILESPARSE_CUDA
    cuda_device(-1);  // or why there is none
    launch_checked("quantize", [&] { return quantize::run(of, stream); });
#else
    static_cast<void>(stream);
    fail_without_cuda();
#endif
}

#ifdef TILESPARSE_CUDA

void multiply_by_gate(const Gate& gate, void* stream) {
    launch_checked("gate", [&] { return gate::multiply(gate, stream); });
}

void differentiate_gate(const Gate& gate, void* stream) {
    launch_checked("gate_gradient", [&] { return gate::differentiate(gate, stream); });
}

#else

void multiply_by_gate(const Gate&, void*) { fail_without_cuda(); }
void differentiate_gate(const Gate&, void*) { fail_without_cuda(); }

#endif

}  // namespace ts
