// The public functions on activations and gates, element by element.

#include "abi.h"
#include "activations.h"
#include "bias_gradient.h"
#include "c_api/guard.h"
#include "combination.h"
#include "descriptors.h"
#include "device.h"
#include "operands.h"

using namespace ts;

ts_status_t ts_activation_gradient_workspace_size(int32_t dtype, int64_t tokens, int64_t features,
                                                  size_t* bytes) {
    return guard([&] {
        check_pointer(bytes, "bytes");
        const ActivationGradient gradient = check_activation_gradient(dtype, TS_RELU, tokens, features);
        *bytes = activation_gradient_workspace_size(gradient, cuda_device(-1).properties);
    });
}

ts_status_t ts_activation_gradient(int32_t dtype, int32_t activation, int64_t tokens, int64_t features,
                                   const void* z, const void* gradient, void* result, void* bias_gradient,
                                   void* workspace, size_t workspace_bytes, ts_stream_t stream) {
    return guard([&] {
        ActivationGradient of = check_activation_gradient(dtype, activation, tokens, features);
        of.z = z;
        of.gradient = gradient;
        of.result = result;
        of.bias_gradient = bias_gradient;
        check_operands(of);
        const Device& device = cuda_device(-1).properties;
        const size_t needed = activation_gradient_workspace_size(of, device);
        if (workspace_bytes < needed)
            fail(TS_WORKSPACE_TOO_SMALL, "workspace_bytes must be at least ", needed, ", got ",
                 workspace_bytes);
        require(needed == 0 || workspace != nullptr, "workspace must not be null");
        check_aligned(workspace, kDeviceAreaAlignment, "workspace");
        check_workspace(of, workspace, needed);
        activation_gradient(of, device, workspace, stream);
    });
}

ts_status_t ts_gate(int32_t dtype, int32_t activation, int64_t tokens, int64_t features,
                    const ts_matrix* gate, const ts_matrix* factor, const ts_matrix* result,
                    ts_stream_t stream) {
    return guard([&] {
        Gate of = check_gate(dtype, activation, tokens, features, gate, factor);
        of.result = check_gate_matrix(of, result, "result");
        check_operands(of, false);
        cuda_device(-1);  // or why there is none
        multiply_by_gate(of, stream);
    });
}

ts_status_t ts_gate_gradient(int32_t dtype, int32_t activation, int64_t tokens, int64_t features,
                             const ts_matrix* gate, const ts_matrix* factor, const ts_matrix* gradient,
                             const ts_matrix* gate_gradient, const ts_matrix* factor_gradient,
                             ts_stream_t stream) {
    return guard([&] {
        Gate of = check_gate(dtype, activation, tokens, features, gate, factor);
        of.result = check_gate_matrix(of, gradient, "gradient");
        of.of_gate = check_gate_matrix(of, gate_gradient, "gate_gradient");
        of.of_factor = check_gate_matrix(of, factor_gradient, "factor_gradient");
        check_operands(of, true);
        cuda_device(-1);  // or why there is none
        differentiate_gate(of, stream);
    });
}

ts_status_t ts_quantize(int32_t device, int32_t dtype, int32_t quantized_dtype, int64_t tokens,
                        int64_t features, const ts_matrix* x, const ts_matrix* quantized, float* scales,
                        ts_stream_t stream) {
    return guard([&] {
        Quantization of = check_quantization(device, dtype, quantized_dtype, tokens, features, x, quantized);
        of.scales = scales;
        check_operands(of);
        quantize_activations(of, stream);
    });
}

ts_status_t ts_quantize_groups(int32_t device, int32_t dtype, int32_t quantized_dtype, int64_t tokens,
                               int64_t features, const ts_matrix* x, const ts_matrix* quantized,
                               float* scales, int64_t scales_ld, ts_stream_t stream) {
    return guard([&] {
        Quantization of = check_group_quantization(device, dtype, quantized_dtype, tokens, features, x,
                                                   quantized, scales_ld);
        of.scales = scales;
        check_operands(of);
        quantize_activations(of, stream);
    });
}

ts_status_t ts_group_sums(int32_t device, int32_t dtype, int32_t result_dtype, int64_t tokens,
                          int64_t features, int64_t groups, const ts_matrix* y, const int32_t* group_offsets,
                          void* sums, ts_stream_t stream) {
    return guard([&] {
        GroupSums of = check_group_sums(device, dtype, result_dtype, tokens, features, groups, y);
        of.offsets = group_offsets;
        of.sums = sums;
        check_operands(of);
        sum_groups(of, stream);
    });
}

ts_status_t ts_combine(int32_t device, int32_t dtype, int64_t tokens, int64_t choices, int64_t features,
                       const ts_matrix* y, const int64_t* rows, const void* weights, const ts_matrix* result,
                       ts_stream_t stream) {
    return guard([&] {
        Combination of = check_combination(device, dtype, tokens, choices, features, result, "result");
        of.y = check_row_matrix(of, y, "y");
        of.rows = rows;
        of.weights = weights;
        check_sum(of);
        combine_rows(of, stream);
    });
}

ts_status_t ts_combine_gradient(int32_t device, int32_t dtype, int64_t tokens, int64_t choices,
                                int64_t features, const ts_matrix* y, const int64_t* rows,
                                const void* weights, const ts_matrix* gradient, const ts_matrix* y_gradient,
                                void* weights_gradient, ts_stream_t stream) {
    return guard([&] {
        Combination of = check_combination(device, dtype, tokens, choices, features, gradient, "gradient");
        require(y_gradient != nullptr || weights_gradient != nullptr,
                "y_gradient must not be null where weights_gradient is");
        of.wants_y = y_gradient != nullptr;
        if (of.wants_y) of.of_y = check_row_matrix(of, y_gradient, "y_gradient");
        of.of_weights = weights_gradient;
        if (weights_gradient != nullptr) of.y = check_row_matrix(of, y, "y");
        of.rows = rows;
        of.weights = weights;
        check_gradients(of);
        differentiate_combination(of, stream);
    });
}
