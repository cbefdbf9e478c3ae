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

// The optional arguments of a Product, by name in Python.
struct ProductOptions {
    int32_t activation = 0, precision = 0, kernel = 0, policy = 0;
    int32_t x_layout = 0, y_layout = 0;
    int64_t ldx = 0, ldy = 0, ldr = 0;     // ldr: of a residual or gate, which has y's layout
    bool residual = false, gated = false;  // gated: the residual is a gate
    int32_t storage = 0, values_dtype = 0, granularity = 0;
    int64_t x_scales_ld = 0;  // of scales inside of the sums; 0: outside
    int32_t result_dtype = 0;
    bool accumulate = false;
    bool bias_gradient = false, accumulate_bias = false;
    int32_t bias_gradient_dtype = 0;
    bool grouped = false;
    int32_t skip = 0;
    float threshold = 0;
    std::string prefer;

    // Calls visit(name, field) for each of them.
    template <class Visit>
    void visit(const Visit& visit) {
        visit("activation", activation);
        visit("precision", precision);
        visit("kernel", kernel);
        visit("policy", policy);
        visit("x_layout", x_layout);
        visit("ldx", ldx);
        visit("y_layout", y_layout);
        visit("ldy", ldy);
        visit("residual", residual);
        visit("ldr", ldr);
        visit("gated", gated);
        visit("storage", storage);
        visit("values_dtype", values_dtype);
        visit("granularity", granularity);
        visit("x_scales_ld", x_scales_ld);
        visit("result_dtype", result_dtype);
        visit("accumulate", accumulate);
        visit("bias_gradient", bias_gradient);
        visit("bias_gradient_dtype", bias_gradient_dtype);
        visit("accumulate_bias", accumulate_bias);
        visit("grouped", grouped);
        visit("skip", skip);
        visit("threshold", threshold);
        visit("prefer", prefer);
    }
};

// One product without the addresses of its operands: all that stays the same from call to call. The owner
// keeps it together with the memory it names.
class Product {
  public:
    Product(const ts_pattern& pattern, int32_t op, int32_t dtype, int32_t device, int64_t tokens,
            const ProductOptions& options)
        : pattern_(pattern), desc_(make<ts_matmul_desc>()), gated_(options.gated) {
        desc_.op = op;
        desc_.device = device;
        desc_.activation = options.activation;
        desc_.precision = options.precision;
        desc_.accumulate = (options.accumulate ? TS_ACCUMULATE_VALUES : 0) |
                           (options.accumulate_bias ? TS_ACCUMULATE_BIAS : 0);
        desc_.kernel = options.kernel;
        desc_.policy = options.policy;
        desc_.tokens = tokens;
        desc_.x.ld = options.ldx;
        desc_.x.layout = options.x_layout;
        desc_.y.ld = options.ldy;
        desc_.y.layout = options.y_layout;
        input().dtype = dtype;
        desc_.values.dtype = options.values_dtype;
        result().dtype = options.result_dtype;
        desc_.values.storage = options.storage;
        desc_.values.granularity = options.granularity;
        if (dtype == TS_INT8 || dtype == TS_FLOAT8_E4M3FN)
            desc_.x.granularity = options.x_scales_ld == 0 ? TS_SCALES_PER_TOKEN : TS_SCALES_PER_GROUP;
        desc_.x.scales_ld = options.x_scales_ld;
        // Any address will do until there is one: it is not followed.
        if (options.residual) other(desc_).data = this;
        other(desc_).ld = options.ldr;
        other(desc_).layout = options.y_layout;
        if (options.bias_gradient) desc_.bias.data = this;
        desc_.bias.dtype = options.bias_gradient_dtype;
        if (options.grouped) desc_.group_offsets = pointer<int32_t>(reinterpret_cast<uintptr_t>(this));
        desc_.skip = options.skip;
        desc_.threshold = options.threshold;
        copy_text(desc_.prefer, options.prefer, "prefer");
    }

    // The place in kernels() of the kernel for that device, or TS_RUN_DENSE, and why.
    std::pair<int32_t, std::string> select(const ts_device_info& device) const {
        char reason[256];
        const int32_t index = choose(device, reason, sizeof reason);
        return {index, reason};
    }

    // Microseconds, 0 where there is no estimate.
    double estimate(const ts_device_info& device, int32_t kernel) const {
        const auto desc = described();
        double microseconds = 0;
        check(ts_matmul_estimate(&desc, &device, number_of(kernel), &microseconds));
        return microseconds;
    }

    // The features of an estimate and the name of its coefficients, see ts_matmul_features.
    std::pair<std::string, std::vector<double>> features(const ts_device_info& device, int32_t kernel) const {
        const auto desc = described();
        std::vector<double> values(64);
        auto count = static_cast<int32_t>(values.size());
        char family[128];
        check(ts_matmul_features(&desc, &device, number_of(kernel), values.data(), &count, family,
                                 sizeof family));
        values.resize(count);
        return {family, values};
    }

    void add_measurement(const ts_device_info& device, int32_t kernel, double microseconds,
                         double dense_microseconds) const {
        const auto desc = described();
        check(ts_measurement_add(&desc, &device, number_of(kernel), microseconds, dense_microseconds));
    }

    // Settles on the kernel for the current device: its index, and the `plan` of its ts_kernel_info.
    std::pair<int32_t, int32_t> resolve() {
        const int32_t index = choose(device_info(desc_.device, -1), nullptr, 0);
        auto chosen = make<ts_kernel_info>();
        desc_.kernel = number_of(index);
        check(ts_kernel_get(desc_.kernel, &chosen));
        return {index, chosen.plan};
    }

    void use_plan(uintptr_t plan, size_t bytes, int64_t key) {
        desc_.plan = {pointer<void>(plan), bytes, key};
    }

    size_t prepacked_size() const {
        const auto desc = described();
        size_t bytes = 0;
        check(ts_values_prepacked_size(&desc, &bytes));
        return bytes;
    }

    void prepack(uintptr_t values, uintptr_t prepacked, size_t bytes, uintptr_t stream) const {
        auto desc = described();
        desc.values.data = pointer<void>(values);
        desc.prepacked = {};
        check(ts_values_prepack(&desc, pointer<void>(prepacked), bytes, pointer<CUstream_st>(stream)));
    }

    void use_prepacked(uintptr_t prepacked, size_t bytes, int64_t key) {
        desc_.prepacked = {pointer<void>(prepacked), bytes, key};
    }

    size_t workspace_size() {
        const auto desc = described();
        check(ts_matmul_workspace_size(&desc, &workspace_bytes_));
        return workspace_bytes_;
    }

    // Writes dense blocks from values, which have no metadata or scales where their addresses are 0.
    void dequantize(uintptr_t values, uintptr_t metadata, uintptr_t scales, uintptr_t dense, size_t bytes,
                    uintptr_t stream) const {
        auto desc = described();
        use_values(desc, values, metadata, scales);
        check(ts_values_dequantize(&desc, pointer<void>(dense), bytes, pointer<CUstream_st>(stream)));
    }

    // `bias`: for TS_SDD_TN, the address of its gradient.
    void run(uintptr_t x, uintptr_t y, uintptr_t values, uintptr_t bias, uintptr_t residual,
             uintptr_t workspace, uintptr_t stream, uintptr_t metadata, uintptr_t scales,
             uintptr_t x_scales = 0, uintptr_t group_offsets = 0) const {
        ts_matmul_desc desc = described();
        desc.x.data = pointer<void>(x);
        desc.y.data = pointer<void>(y);
        use_values(desc, values, metadata, scales);
        desc.bias.data = pointer<void>(bias);
        other(desc).data = pointer<void>(residual);
        desc.x.scales = pointer<float>(x_scales);
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
    // The residual or gate.
    ts_operand& other(ts_matmul_desc& desc) const { return gated_ ? desc.gate : desc.residual; }

    // The operand whose dtype is the product's, and the one that is written.
    ts_operand& input() { return desc_.op == TS_DDS_NN ? desc_.y : desc_.x; }
    ts_operand& result() {
        return desc_.op == TS_DDS_NT ? desc_.y : desc_.op == TS_DDS_NN ? desc_.x : desc_.values;
    }

    static void use_values(ts_matmul_desc& desc, uintptr_t values, uintptr_t metadata, uintptr_t scales) {
        desc.values.data = pointer<void>(values);
        desc.values.metadata = pointer<void>(metadata);
        desc.values.scales = pointer<float>(scales);
    }

    int32_t choose(const ts_device_info& device, char* reason, size_t reason_bytes) const {
        const auto desc = described();
        int32_t number = TS_RUN_DENSE;
        check(ts_matmul_select(&desc, &device, &number, reason, reason_bytes));
        return index_of(number);
    }

    // The current descriptor: a copy of this object has a pattern of its own.
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
