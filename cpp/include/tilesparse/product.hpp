// Products.
#ifndef TILESPARSE_PRODUCT_HPP_
#define TILESPARSE_PRODUCT_HPP_

#include <tilesparse/buffer.hpp>
#include <tilesparse/error.hpp>
#include <tilesparse/kernels.hpp>
#include <tilesparse/operand.hpp>
#include <tilesparse/pattern.hpp>
#include <tilesparse/plan.hpp>
#include <tilesparse/product_operands.hpp>
#include <tilesparse/span.hpp>
#include <tilesparse/types.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tilesparse {
inline namespace v0_1 {

// One product of ts_matmul. Dtypes are those of the operands: activations, values and result may differ in
// theirs, as the C interface has it. Setters check what they can at once; sizes of operands, and all else,
// are checked by each call.
class Product {
  public:
    // On the CPU.
    Product(Op op, const Pattern& pattern, std::int64_t tokens)
        : Product(op, pattern.c(), tokens, Device::cpu) {}
    // On the CUDA device that is current in each call.
    template <class Memory>
    Product(Op op, const DevicePattern<Memory>& pattern, std::int64_t tokens)
        : Product(op, pattern.c(), tokens, Device::cuda) {}
    Product(Op, const Pattern&&, std::int64_t) = delete;  // would not live
    template <class Memory>
    Product(Op, const DevicePattern<Memory>&&, std::int64_t) = delete;
    // For a pattern that other code keeps, for example one that changes on the device.
    Product(Op op, const ts_pattern& pattern, std::int64_t tokens, Device device) : pattern_(pattern) {
        check_version();
        desc_.struct_size = sizeof desc_;
        desc_.op = static_cast<std::int32_t>(op);
        desc_.device = static_cast<std::int32_t>(device);
        desc_.tokens = tokens;
    }

    // A grouped product: token t of row-major x and y meets the weight of the group g for which offsets[g] <=
    // t < offsets[g + 1] alone, so y, residual and gate are [tokens, out_features / groups]. offsets [groups
    // + 1] ascend from 0 to tokens, in memory of the device.
    Product& group_offsets(Span<const std::int32_t> offsets) {
        detail::check_count("group_offsets", offsets.size(), groups() + 1);
        desc_.group_offsets = offsets.data();
        return *this;
    }

    // x [tokens, in_features], y, residual and gate [tokens, out_features]. `ld` is the number of elements
    // from one row (column-major: column) to the next; 0 stands for no gap.
    Product& x(Array x, Layout layout = Layout::row_major, std::int64_t ld = 0) {
        return set(given_.x, desc_.x, x, layout, ld);
    }
    Product& y(Array y, Layout layout = Layout::row_major, std::int64_t ld = 0) {
        return set(given_.y, desc_.y, y, layout, ld);
    }
    // In y's layout and dtype.
    Product& residual(Array residual, std::int64_t ld = 0) {
        return set(given_.residual, desc_.residual, residual, Layout::row_major, ld);
    }
    // A GLU gate, in place of a residual. The activation then applies to the gate.
    Product& gate(Array gate, std::int64_t ld = 0) {
        return set(given_.gate, desc_.gate, gate, Layout::row_major, ld);
    }
    // [nnz, rows, cols], or [nnz, rows, cols / 2] with metadata or of Int4Pair.
    Product& values(Array values) {
        forget_prepacked();
        given_.values = detail::given(values);
        desc_.values.data = values.data();
        return *this;
    }
    // Words [nnz, cols / 32, rows / 16, 8, 2] of values that are TS_STORAGE_2_4.
    Product& metadata(Span<const std::uint32_t> metadata) {
        forget_prepacked();
        given_.metadata = metadata.size();
        desc_.values.metadata = metadata.data();
        desc_.values.storage = TS_STORAGE_2_4;
        return *this;
    }
    // [nnz] or [nnz, rows], of values of 8 or 4 bits; [out_features] where x has 8 bits and scales by token.
    Product& scales(Span<const float> scales) {
        forget_prepacked();
        given_.scales = scales.size();
        desc_.values.scales = scales.data();
        return *this;
    }
    // [tokens], of x in 8 bits; with `ld` [in_features / 128][ld], inside of the sums.
    Product& x_scales(Span<const float> scales, std::int64_t ld = 0) {
        given_.x_scales = scales.size();
        desc_.x.scales = scales.data();
        desc_.x.scales_ld = ld;
        desc_.x.granularity = ld == 0 ? TS_SCALES_PER_TOKEN : TS_SCALES_PER_GROUP;
        return *this;
    }
    // [out_features], in the dtype of the activations; of y where x has 8 bits.
    Product& bias(Array bias) {
        given_.bias = detail::given(bias);
        desc_.bias.data = bias.data();
        return *this;
    }
    // Op::sdd_tn only: [out_features], in the dtype of the activations or, where that has 16 bits, float32.
    // Receives the sums over tokens of y, which are added to what is there if `accumulate` says so.
    Product& bias_gradient(Array gradient, bool accumulate = false) {
        given_.bias_gradient = detail::given(gradient);
        desc_.bias.data = gradient.data();
        return accumulate_if(accumulate, TS_ACCUMULATE_BIAS);
    }
    Product& activation(Activation activation) {
        desc_.activation = static_cast<std::int32_t>(activation);
        return *this;
    }
    Product& precision(Precision precision) {
        desc_.precision = static_cast<std::int32_t>(precision);
        return *this;
    }
    // Op::sdd_tn only: adds to the values.
    Product& accumulate(bool accumulate) { return accumulate_if(accumulate, TS_ACCUMULATE_VALUES); }
    // The answers that select() may give.
    Product& policy(Policy policy) {
        desc_.policy = static_cast<std::int32_t>(policy);
        return *this;
    }
    // The beginning of the names of kernels that are to compute it if they can; empty: what TILESPARSE_KERNEL
    // says. Fewer than 64 characters, none of them zero.
    Product& prefer(std::string_view names) {
        detail::copy_names("prefer", names, desc_.prefer);
        return *this;
    }
    // The number of the kernel to use, see kernel_info(); without it the library chooses in each call.
    Product& kernel(std::int32_t kernel) {
        detail::require(
            kernel >= 1 && kernel <= ts_kernel_count(),
            "kernel must be 1 to " + detail::text(ts_kernel_count()) + ", got " + detail::text(kernel));
        if (desc_.kernel != kernel) forget_prepacked();
        desc_.kernel = kernel;
        return *this;
    }
    // A plan, and the kernel that it was made for.
    template <class Memory>
    Product& plan(const Plan<Memory>& plan) {
        kernel(plan.kernel());
        desc_.plan = {plan.data(), plan.bytes(), plan.key()};
        return *this;
    }
    template <class Memory>
    Product& plan(const Plan<Memory>&&) = delete;

    // The kernel that would compute this, on a device that need not be there or on that of the product.
    Choice select(const ts_device_info& device) const {
        const ts_matmul_desc desc = c();
        std::vector<char> reason(1024);
        Choice choice{0, {}};
        check(ts_matmul_select(&desc, &device, &choice.kernel, reason.data(), reason.size()));
        choice.reason = reason.data();
        return choice;
    }
    Choice select() const { return select(device_info(static_cast<Device>(desc_.device))); }

    // Microseconds that a kernel, or TS_RUN_DENSE, is estimated to take for this, where there is
    // an estimate. Throws UnsupportedError, which says why, where that kernel does not compute it on the
    // device.
    std::optional<double> estimate(std::int32_t kernel, const ts_device_info& device) const {
        const ts_matmul_desc desc = c();
        double microseconds = 0;
        check(ts_matmul_estimate(&desc, &device, kernel, &microseconds));
        return microseconds > 0 ? std::optional(microseconds) : std::nullopt;
    }

    // Bytes of scratch memory, on the device of the product.
    std::size_t workspace_size() const {
        const ts_matmul_desc desc = c();
        std::size_t bytes = 0;
        check(ts_matmul_workspace_size(&desc, &bytes));
        return bytes;
    }

    // Computes the product. On the CPU, with a workspace that the Product keeps.
    void run() {
        detail::require(desc_.device == TS_CPU,
                        "device must be the CPU: on a GPU call run(workspace, stream)");
        const std::size_t bytes = workspace_size();
        if (workspace_.size() < bytes) workspace_ = Buffer<std::byte>(bytes);
        run(workspace_.data(), workspace_.size(), nullptr);
    }
    // On a stream of the current device, where nothing waits and all may be captured in a graph.
    template <class Memory>
    void run(Buffer<std::byte, Memory>& workspace, ts_stream_t stream) const {
        run(workspace.data(), workspace.size(), stream);
    }
    void run(void* workspace, std::size_t bytes, ts_stream_t stream) const {
        const ts_matmul_desc desc = c();
        check(ts_matmul(&desc, workspace, bytes, stream));
    }

    // Prepacks values into the order in which the kernel reads them, for many products: prepacked_size()
    // bytes, 0 for kernels that have no use for it. The kernel and plan are set before; prepack() again when
    // values change. Setters of values and of another kernel forget them.
    std::size_t prepacked_size() const {
        const ts_matmul_desc desc = c();
        std::size_t bytes = 0;
        check(ts_values_prepacked_size(&desc, &bytes));
        return bytes;
    }
    template <class Memory>
    Product& prepack(Buffer<std::byte, Memory>& prepacked, ts_stream_t stream) {
        forget_prepacked();  // which this call may write
        const ts_matmul_desc desc = c();
        check(ts_values_prepack(&desc, prepacked.data(), prepacked.size(), stream));
        desc_.prepacked = {prepacked.data(), prepacked.size(), desc.plan.key};
        return *this;
    }

    // Dequantizes values of any storage to dense blocks [nnz, rows, cols] in the dtype of the activations.
    void dequantize(Array dense, ts_stream_t stream = nullptr) const {
        const ts_matmul_desc desc = c();
        detail::require(!dense.is_const(), "dense must not be const");
        const auto dtype = (desc.op == TS_DDS_NN ? given_.y : given_.x).dtype;
        detail::require(dense.dtype() == dtype,
                        std::string("dense must be of the dtype of the activations, ") + name_of(dtype) +
                            ", got " + name_of(dense.dtype()));
        check(ts_values_dequantize(&desc, dense.data(), dense.size() * size_of(dense.dtype()), stream));
    }

    // For the functions of tilesparse.h, sizes and dtypes checked; valid while the Product stays where it is.
    // Throws InvalidArgumentError.
    ts_matmul_desc c() const {
        detail::check_given("x", given_.x, desc_.op == TS_DDS_NN);
        detail::check_given("y", given_.y, desc_.op == TS_DDS_NT);
        detail::check_given("values", given_.values, desc_.op == TS_SDD_TN);
        if (given_.bias_gradient.is_given) {
            detail::check_given("bias_gradient", given_.bias_gradient, true);
            detail::require(desc_.op == TS_SDD_TN, "bias_gradient must not be set unless op is sdd_tn");
        }
        detail::require(!given_.bias.is_given || desc_.op == TS_DDS_NT,
                        "bias must not be set unless op is dds_nt");
        given_.check_dtypes(desc_.op);
        ts_matmul_desc desc = desc_;
        desc.pattern = &pattern_;
        desc.x.dtype = code(given_.x);
        desc.y.dtype = code(given_.y);
        desc.values.dtype = code(given_.values);
        desc.bias.dtype = code(desc.op == TS_SDD_TN ? given_.bias_gradient : given_.bias);
        desc.residual.dtype = code(given_.residual);
        desc.gate.dtype = code(given_.gate);
        if (desc.values.scales != nullptr) desc.values.granularity = given_.granularity(desc, pattern_);
        if (given_.residual.is_given) desc.residual.layout = desc.y.layout;
        if (given_.gate.is_given) desc.gate.layout = desc.y.layout;
        detail::finish_matrix("x", given_.x, desc.x, desc.tokens, pattern_.in_features);
        const std::int64_t of_y = pattern_.out_features / groups();
        detail::finish_matrix("y", given_.y, desc.y, desc.tokens, of_y);
        detail::finish_matrix("residual", given_.residual, desc.residual, desc.tokens, of_y);
        detail::finish_matrix("gate", given_.gate, desc.gate, desc.tokens, of_y);
        given_.check_sizes(desc, pattern_);
        return desc;
    }

  private:
    std::int64_t groups() const { return pattern_.groups > 1 ? pattern_.groups : 1; }

    static std::int32_t code(const detail::Operand& operand) {
        return operand.is_given ? static_cast<std::int32_t>(operand.dtype) : TS_DTYPE_DEFAULT;
    }

    Product& set(detail::Operand& operand, ts_operand& matrix, const Array& array, Layout layout,
                 std::int64_t ld) {
        operand = detail::given(array);
        matrix.data = array.data();
        matrix.ld = ld;
        matrix.layout = static_cast<std::int32_t>(layout);
        return *this;
    }

    Product& accumulate_if(bool accumulate, std::int32_t bit) {
        desc_.accumulate = accumulate ? desc_.accumulate | bit : desc_.accumulate & ~bit;
        return *this;
    }

    void forget_prepacked() { desc_.prepacked = {}; }

    ts_pattern pattern_;
    ts_matmul_desc desc_{};  // without its pattern, dtypes and what follows from them
    detail::ProductOperands given_;
    Buffer<std::byte> workspace_;
};

}  // namespace v0_1
}  // namespace tilesparse

#endif  // TILESPARSE_PRODUCT_HPP_
