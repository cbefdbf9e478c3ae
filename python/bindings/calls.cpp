// Products of one pattern that have run, kept to run again.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "product.h"
#include "support.h"
#include "tensors.h"

namespace bindings {
namespace {

// One request for a product of the pattern: x and values for TS_DDS_NT, y and values for TS_DDS_NN,
// y and x for TS_SDD_TN. What follows them may be None.
struct Request {
    int32_t op;
    nb::handle first, second, bias, residual;
    int32_t activation;
    bool column_major;
    nb::handle metadata, scales;  // of values
    int32_t kernel;               // as in ts_matmul_desc
    bool gated;                   // the residual is a gate
    int32_t skip = 0;             // as in ts_matmul_desc
    float threshold = 0;
    // For TS_DDS_NT in 8 bits: the scales of x, the activations that x was made from, whose dtype the result
    // has, and whether sums may be fast.
    nb::handle x_scales{}, source{};
    bool fast = false;

    bool is_quantized() const { return x_scales.is_valid(); }
    nb::handle like() const { return is_quantized() ? source : first; }
};

// A request in the terms of the C ABI.
struct Operands {
    Key key;
    uintptr_t first = 0, second = 0, bias = 0, residual = 0, metadata = 0, scales = 0, x_scales = 0,
              stream = 0;

    // Returns false for requests that are not kept.
    bool read(const Tensors& tensors, const Request& request) {
        key.add(request.op | request.activation << 8 | request.column_major << 16 | request.gated << 17 |
                request.is_quantized() << 18 | request.fast << 19 | request.skip << 20);
        if (request.skip != 0) key.add(std::bit_cast<int32_t>(request.threshold));
        dlpack::Tensor like, other;
        if (request.is_quantized() && !add_source(tensors, request)) return false;
        if (!add(tensors, request.first, like, first) || !add(tensors, request.second, other, second) ||
            !add(tensors, request.residual, other, residual) ||
            !add(tensors, request.metadata, other, metadata) ||
            !add(tensors, request.scales, other, scales) || !add(tensors, request.bias, other, bias))
            return false;
        const bool has_bias = !request.bias.is_none();
        if (has_bias && (other.dims != 1 || other.strides[0] != 1)) return false;
        bool tf32 = false;
        if (like.device_type == dlpack::cuda) {
            constexpr uintptr_t alignment = 16;  // as tilesparse._checks.ALIGNMENT
            if ((first | second | residual | metadata | x_scales) % alignment != 0 ||
                !tensors.is_on_current_device(like))
                return false;
            stream = tensors.current_stream(like);
            tf32 = tensors.multiplies_in_tf32(like);
        }
        key.add(static_cast<int64_t>(stream));
        key.add(int64_t{request.kernel} * 2 + tf32);
        return true;
    }

  private:
    // Nothing reads the memory of the source.
    bool add_source(const Tensors& tensors, const Request& request) {
        dlpack::Tensor tensor;
        uintptr_t unread;
        return add(tensors, request.x_scales, tensor, x_scales) &&
               add(tensors, request.source, tensor, unread);
    }

    bool add(const Tensors& tensors, nb::handle object, dlpack::Tensor& tensor, uintptr_t& at) {
        if (object.is_none()) {
            key.add(0);
            return true;
        }
        if (!tensors.read(object, tensor) || tensor.dims > Key::max_dims) return false;
        key.add(tensor);
        at = address(tensor);
        return true;
    }
};

// A recipe for a tensor: a method of torch.Tensor and its arguments.
class Allocation {
  public:
    Allocation() = default;
    Allocation(nb::object method, nb::tuple arguments)
        : method_(std::move(method)), arguments_(std::move(arguments)) {}

    bool fits() const { return !method_.is_valid() || arguments_.size() <= Key::max_dims; }

    // For a tensor of this dtype and on this device; none by default.
    nb::object operator()(nb::handle like) const {
        if (!method_.is_valid()) return {};
        std::array<PyObject*, 1 + Key::max_dims> stack{like.ptr()};
        const size_t count = arguments_.size();
        for (size_t i = 0; i < count; ++i) stack[1 + i] = nb::handle(arguments_[i]).ptr();
        PyObject* made = PyObject_Vectorcall(method_.ptr(), stack.data(), 1 + count, nullptr);
        if (made == nullptr) throw nb::python_error();
        return nb::steal(made);
    }

  private:
    nb::object method_;
    nb::tuple arguments_;
};

// The products of one pattern that have run, so that running one again takes one look-up. Not kept are
// operands of more dimensions, operands that must be copied, and other devices than the current one.
class Calls {
  public:
    explicit Calls(const Tensors& tensors) : tensors_(tensors) {}

    // The result, or None where no such call is kept.
    std::optional<nb::any> run(const Request& request) const {
        Operands operands;
        if (!operands.read(tensors_, request)) return std::nullopt;
        const auto found = calls_.find(operands.key);
        if (found == calls_.end()) return std::nullopt;
        const std::shared_ptr<const Call> call = found->second;  // others may drop it while this runs
        const uint64_t cleared = cleared_;
        auto result = nb::borrow<nb::any>(call->result(request.like()));
        const nb::object workspace = call->workspace(request.like());
        const uintptr_t result_at = tensors_.address_of(result);
        const uintptr_t workspace_at = workspace.is_valid() ? tensors_.address_of(workspace) : 0;
        // Another thread may have run meanwhile. If it has, the pattern is being updated.
        if (cleared != cleared_) return std::nullopt;
        const auto& [key, first, second, bias, residual, metadata, scales, x_scales, stream] = operands;
        if (request.op == TS_DDS_NT)
            call->product.run(first, result_at, second, bias, residual, workspace_at, stream, metadata,
                              scales, x_scales);
        else if (request.op == TS_DDS_NN)
            call->product.run(result_at, first, second, 0, 0, workspace_at, stream, metadata, scales);
        else
            call->product.run(second, first, result_at, 0, 0, workspace_at, stream, 0, 0);
        return result;
    }

    // Runs such products from now on without asking again.
    void keep(const Request& request, const Product& product, Allocation result, Allocation workspace) {
        Operands operands;
        if (!operands.read(tensors_, request) || !result.fits() || !workspace.fits()) return;
        calls_[operands.key] = std::make_shared<Call>(Call{product, std::move(result), std::move(workspace)});
    }

    void clear() {
        ++cleared_;
        calls_.clear();
    }
    size_t size() const { return calls_.size(); }

  private:
    struct Call {
        Product product;
        Allocation result, workspace;
    };

    const Tensors& tensors_;
    std::unordered_map<Key, std::shared_ptr<const Call>, KeyHash> calls_;
    uint64_t cleared_ = 0;  // how often
};

using Recipe = std::pair<nb::object, AnyTuple>;  // see Allocation

Allocation allocation(const std::optional<Recipe>& recipe) {
    return recipe ? Allocation{recipe->first, recipe->second} : Allocation{};
}

// A request for TS_DDS_NT in 8 bits.
Request quantized(nb::handle x, nb::handle x_values, nb::handle x_scales, nb::handle values,
                  nb::handle scales, nb::handle bias, nb::handle residual, int32_t activation,
                  bool column_major, int32_t kernel, bool gated, bool fast, nb::handle metadata) {
    return {TS_DDS_NT, x_values, values, bias, residual, activation, column_major, metadata, scales,
            kernel,    gated,    0,      0,    x_scales, x,          fast};
}

}  // namespace

void bind_calls(nb::module_& m) {
    nb::class_<Calls>(m, "Calls")
        .def(nb::init<const Tensors&>(), nb::keep_alive<1, 2>(), "tensors"_a)
        .def(
            "run",
            [](const Calls& self, int32_t op, nb::handle first, nb::handle second, nb::handle bias,
               nb::handle residual, int32_t activation, bool column_major, nb::handle metadata,
               nb::handle scales, int32_t kernel, bool gated, int32_t skip, float threshold) {
                return self.run({op, first, second, bias, residual, activation, column_major, metadata,
                                 scales, kernel, gated, skip, threshold});
            },
            "op"_a, "first"_a, "second"_a, "bias"_a.none(), "residual"_a.none(), "activation"_a,
            "column_major"_a, "metadata"_a.none(), "scales"_a.none(), "kernel"_a, "gated"_a, "skip"_a = 0,
            "threshold"_a = 0.0f)
        .def(
            "keep",
            [](Calls& self, int32_t op, nb::handle first, nb::handle second, nb::handle bias,
               nb::handle residual, int32_t activation, bool column_major, nb::handle metadata,
               nb::handle scales, int32_t kernel, bool gated, const Product& product, Recipe result,
               std::optional<Recipe> workspace, int32_t skip, float threshold) {
                self.keep({op, first, second, bias, residual, activation, column_major, metadata, scales,
                           kernel, gated, skip, threshold},
                          product, allocation(result), allocation(workspace));
            },
            "op"_a, "first"_a, "second"_a, "bias"_a.none(), "residual"_a.none(), "activation"_a,
            "column_major"_a, "metadata"_a.none(), "scales"_a.none(), "kernel"_a, "gated"_a, "product"_a,
            "result"_a, "workspace"_a.none(), "skip"_a = 0, "threshold"_a = 0.0f)
        .def(
            "run_quantized",
            [](const Calls& self, nb::handle x, nb::handle x_values, nb::handle x_scales, nb::handle values,
               nb::handle scales, nb::handle bias, nb::handle residual, int32_t activation, bool column_major,
               int32_t kernel, bool gated, bool fast, nb::handle metadata) {
                return self.run(quantized(x, x_values, x_scales, values, scales, bias, residual, activation,
                                          column_major, kernel, gated, fast, metadata));
            },
            "x"_a, "x_values"_a, "x_scales"_a, "values"_a, "scales"_a, "bias"_a.none(), "residual"_a.none(),
            "activation"_a, "column_major"_a, "kernel"_a, "gated"_a, "fast"_a, "metadata"_a.none())
        .def(
            "keep_quantized",
            [](Calls& self, nb::handle x, nb::handle x_values, nb::handle x_scales, nb::handle values,
               nb::handle scales, nb::handle bias, nb::handle residual, int32_t activation, bool column_major,
               int32_t kernel, bool gated, bool fast, nb::handle metadata, const Product& product,
               Recipe result, std::optional<Recipe> workspace) {
                self.keep(quantized(x, x_values, x_scales, values, scales, bias, residual, activation,
                                    column_major, kernel, gated, fast, metadata),
                          product, allocation(result), allocation(workspace));
            },
            "x"_a, "x_values"_a, "x_scales"_a, "values"_a, "scales"_a, "bias"_a.none(), "residual"_a.none(),
            "activation"_a, "column_major"_a, "kernel"_a, "gated"_a, "fast"_a, "metadata"_a.none(),
            "product"_a, "result"_a, "workspace"_a.none())
        .def("clear", &Calls::clear)
        .def("__len__", &Calls::size);
}

}  // namespace bindings
