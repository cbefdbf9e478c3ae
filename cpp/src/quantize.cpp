#include "quantize.h"

#include <bit>
#include <cmath>
#include <cstddef>

#include "cpu/steps.h"
#include "device.h"
#include "error.h"
#include "threads.h"

namespace ts {
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

}  // namespace ts
