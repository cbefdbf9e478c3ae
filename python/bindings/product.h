// Products that are described once and run many times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "devices.h"
#include "support.h"

namespace bindings {

// One product without the addresses of its operands: all that stays the same from call to call. Whoever makes
// it keeps it together with the memory it names.
class Product {
  public:
    Product(const ts_pattern& pattern, int32_t op, int32_t dtype, int32_t device, int64_t tokens,
            int32_t activation, int32_t precision, bool accumulate, int32_t kernel, int32_t policy,
            int32_t x_layout, int64_t ldx, int32_t y_layout, int64_t ldy, bool residual, int64_t ldr,
            int32_t storage, int32_t values_dtype, int32_t row_scales, int32_t result_dtype,
            const std::string& prefer, bool gated, bool bias_gradient, int32_t bias_gradient_dtype,
            bool accumulate_bias, bool grouped, int64_t x_scales_ld)
        : pattern_(pattern), desc_(make<ts_matmul_desc>()), gated_(gated) {
        desc_.op = op;
        desc_.dtype = dtype;
        desc_.device = device;
        desc_.tokens = tokens;
        desc_.activation = activation;
        desc_.precision = precision;
        desc_.accumulate = accumulate;
        desc_.kernel = kernel;
        desc_.policy = policy;
        desc_.x = {nullptr, ldx, x_layout, 0};
        desc_.y = {nullptr, ldy, y_layout, 0};
        // Any address will do until there is one: it is not followed.
        other(desc_) = {residual ? this : nullptr, ldr, y_layout, 0};
        desc_.storage = storage;
        desc_.result_dtype = result_dtype + 1;
        desc_.values_dtype = (op == TS_SDD_TN ? result_dtype : values_dtype) + 1;  // it writes the values
        desc_.row_scales = row_scales;
        if (bias_gradient) desc_.bias_gradient = this;  // likewise
        desc_.bias_gradient_dtype = bias_gradient_dtype + 1;
        desc_.accumulate_bias = accumulate_bias;
        if (grouped) desc_.group_offsets = pointer<int32_t>(reinterpret_cast<uintptr_t>(this));  // likewise
        desc_.x_scales_ld = x_scales_ld;
        copy_text(desc_.prefer, prefer, "prefer");
    }

    // The kernel for that device, or TS_RUN_DENSE, and why.
    std::pair<int32_t, std::string> select(const ts_device_info& device) const {
        char reason[256];
        const int32_t index = choose(device, reason, sizeof reason);
        return {index, reason};
    }

    // Microseconds, 0 where there is no estimate.
    double estimate(const ts_device_info& device, int32_t kernel) const {
        const auto desc = described();
        double microseconds = 0;
        check(ts_matmul_estimate(&desc, &device, kernel, &microseconds));
        return microseconds;
    }

    // What an estimate is made of, and the name of its coefficients, see ts_matmul_features.
    std::pair<std::string, std::vector<double>> features(const ts_device_info& device, int32_t kernel) const {
        const auto desc = described();
        std::vector<double> values(64);
        auto count = static_cast<int32_t>(values.size());
        char family[128];
        check(ts_matmul_features(&desc, &device, kernel, values.data(), &count, family, sizeof family));
        values.resize(count);
        return {family, values};
    }

    void add_measurement(const ts_device_info& device, int32_t kernel, double microseconds,
                         double dense_microseconds) const {
        const auto desc = described();
        check(ts_measurement_add(&desc, &device, kernel, microseconds, dense_microseconds));
    }

    // Settles on the kernel for the current device: its index, and the `plan` of its ts_kernel_info.
    std::pair<int32_t, int32_t> resolve() {
        const int32_t index = choose(device_info(desc_.device, -1), nullptr, 0);
        auto chosen = make<ts_kernel_info>();
        check(ts_kernel_get(index, &chosen));
        desc_.kernel = index + 1;
        return {index, chosen.plan};
    }

    void use_plan(uintptr_t plan, size_t bytes, int64_t key) {
        desc_.plan = pointer<void>(plan);
        desc_.plan_bytes = bytes;
        desc_.plan_key = key;
    }

    size_t packed_size() const {
        const auto desc = described();
        size_t bytes = 0;
        check(ts_values_packed_size(&desc, &bytes));
        return bytes;
    }

    void pack(uintptr_t values, uintptr_t packed, size_t bytes, uintptr_t stream) const {
        auto desc = described();
        desc.values = pointer<void>(values);
        desc.packed = nullptr;
        check(ts_values_pack(&desc, pointer<void>(packed), bytes, pointer<CUstream_st>(stream)));
    }

    void use_packed(uintptr_t packed, size_t bytes, int64_t key) {
        desc_.packed = pointer<void>(packed);
        desc_.packed_bytes = bytes;
        desc_.packed_key = key;
    }

    size_t workspace_size() {
        const auto desc = described();
        check(ts_matmul_workspace_size(&desc, &workspace_bytes_));
        return workspace_bytes_;
    }

    // Writes dense blocks from values, which have no metadata or scales where their addresses are 0.
    void expand(uintptr_t values, uintptr_t metadata, uintptr_t scales, uintptr_t plain, size_t bytes,
                uintptr_t stream) const {
        auto desc = described();
        use_values(desc, values, metadata, scales);
        check(ts_values_expand(&desc, pointer<void>(plain), bytes, pointer<CUstream_st>(stream)));
    }

    // `bias`: of TS_SDD_TN its gradient.
    void run(uintptr_t x, uintptr_t y, uintptr_t values, uintptr_t bias, uintptr_t residual,
             uintptr_t workspace, uintptr_t stream, uintptr_t metadata, uintptr_t scales,
             uintptr_t x_scales = 0, uintptr_t group_offsets = 0) const {
        ts_matmul_desc desc = described();
        desc.x.data = pointer<void>(x);
        desc.y.data = pointer<void>(y);
        use_values(desc, values, metadata, scales);
        if (desc.op == TS_SDD_TN)
            desc.bias_gradient = pointer<void>(bias);
        else
            desc.bias = pointer<void>(bias);
        other(desc).data = pointer<void>(residual);
        desc.x_scales = pointer<float>(x_scales);
        desc.group_offsets = pointer<int32_t>(group_offsets);
        ts_status_t status;
        if (desc.device == TS_CPU) {
            const nb::gil_scoped_release release;  // a product on the CPU takes long; a launch does not
            status = ts_matmul(&desc, pointer<void>(workspace), workspace_bytes_, nullptr);
        } else {
            status =
                ts_matmul(&desc, pointer<void>(workspace), workspace_bytes_, pointer<CUstream_st>(stream));
        }
        check(status);
    }

  private:
    // The residual, or what is the gate.
    ts_matrix& other(ts_matmul_desc& desc) const { return gated_ ? desc.gate : desc.residual; }

    static void use_values(ts_matmul_desc& desc, uintptr_t values, uintptr_t metadata, uintptr_t scales) {
        desc.values = pointer<void>(values);
        desc.metadata = pointer<void>(metadata);
        desc.scales = pointer<float>(scales);
    }

    int32_t choose(const ts_device_info& device, char* reason, size_t reason_bytes) const {
        const auto desc = described();
        int32_t index = -1;
        check(ts_matmul_select(&desc, &device, &index, reason, reason_bytes));
        return index;
    }

    // The descriptor as of now: a copy of this object has a pattern of its own.
    ts_matmul_desc described() const {
        ts_matmul_desc desc = desc_;
        desc.pattern = &pattern_;
        return desc;
    }

    ts_pattern pattern_;
    ts_matmul_desc desc_;
    bool gated_;  // the residual is a gate
    size_t workspace_bytes_ = 0;
};

}  // namespace bindings
