// Activations in 8 bits.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>

#include "support.h"
#include "tensors.h"

namespace bindings {
namespace {

// The address of a row-major matrix, and the elements from one row to the next.
using Rows = std::pair<uintptr_t, int64_t>;

// `scales_ld`: of scales of groups; 0: one for each token.
void quantize(int32_t device, int32_t dtype, int32_t quantized_dtype, int64_t tokens, int64_t features,
              Rows x, Rows quantized, uintptr_t scales, uintptr_t stream, int64_t scales_ld = 0) {
    const ts_matrix from{pointer<void>(x.first), x.second, TS_ROW_MAJOR, 0};
    const ts_matrix to{pointer<void>(quantized.first), quantized.second, TS_ROW_MAJOR, 0};
    const auto run = [&] {
        if (scales_ld != 0)
            return ts_quantize_groups(device, dtype, quantized_dtype, tokens, features, &from, &to,
                                      pointer<float>(scales), scales_ld, pointer<CUstream_st>(stream));
        return ts_quantize(device, dtype, quantized_dtype, tokens, features, &from, &to,
                           pointer<float>(scales), pointer<CUstream_st>(stream));
    };
    ts_status_t status;
    if (device == TS_CPU) {
        const nb::gil_scoped_release release;
        status = run();
    } else {
        status = run();
    }
    check(status);
}

// Quantizes PyTorch's tensors with one look at them. Not those that the library refuses or that must be
// copied, no single tokens without a dimension for them, and none on another device than the current one.
class Quantizer {
  public:
    explicit Quantizer(const Tensors& tensors) : tensors_(tensors) {}

    // Values and scales, or None. `number`: the dtype of the values as ts_quantize has it.
    std::optional<AnyTuple> run(nb::handle x, int32_t number) const {
        dlpack::Tensor tensor;
        if (!tensors_.read(x, tensor)) return std::nullopt;
        const auto found = likes_.find(key(tensor, number));
        const std::optional<Operand> operand = read(tensor);
        if (found == likes_.end() || !operand) return std::nullopt;
        const nb::object values = allocate(found->second.values, tensor.sizes, tensor.dims);
        const nb::object scales = allocate(found->second.scales, tensor.sizes, tensor.dims - 1);
        quantize(tensor.device_type == dlpack::cuda ? TS_CUDA : TS_CPU, operand->dtype, number,
                 operand->tokens, operand->features, {address(tensor), operand->ld},
                 {tensors_.address_of(values), operand->features}, tensors_.address_of(scales),
                 operand->stream);
        return nb::make_tuple(values, scales);
    }

    // Has `run` allocate results of this dtype as tensors like these: it takes half the time of new_empty
    // with a dtype. `new_empty`: their method.
    void keep(nb::object values, nb::object scales, int32_t number, nb::object new_empty) {
        dlpack::Tensor tensor;
        if (!tensors_.read(values, tensor)) return;
        likes_[key(tensor, number)] = {std::move(values), std::move(scales)};
        new_empty_ = std::move(new_empty);
    }

  private:
    struct Operand {
        int32_t dtype;
        int64_t tokens, features, ld;
        uintptr_t stream;
    };

    std::optional<Operand> read(const dlpack::Tensor& tensor) const {
        constexpr int64_t alignment = 16;  // as tilesparse._checks.ALIGNMENT; and of the features
        const int32_t last = tensor.dims - 1;
        const std::optional<int32_t> dtype = dtype_of(tensor.dtype);
        if (last < 1 || last >= Key::max_dims || !dtype) return std::nullopt;
        Operand operand{*dtype, 1, tensor.sizes[last], tensor.sizes[last], 0};
        if (operand.features % alignment != 0 || tensor.strides[last] != 1) return std::nullopt;
        for (int32_t i = last - 1; i >= 0; --i) {
            if (tensor.sizes[i] == 1) continue;
            if (operand.tokens == 1)
                operand.ld = tensor.strides[i];
            else if (tensor.strides[i] != operand.tokens * operand.ld)
                return std::nullopt;
            operand.tokens *= tensor.sizes[i];
        }
        if (operand.tokens == 0 || operand.features == 0 || operand.ld < operand.features)
            return std::nullopt;
        if (tensor.device_type == dlpack::cuda) {
            const int64_t row = operand.ld * (tensor.dtype.bits / 8);
            if (address(tensor) % alignment != 0 || row % alignment != 0 ||
                !tensors_.is_on_current_device(tensor))
                return std::nullopt;
            operand.stream = tensors_.current_stream(tensor);
        }
        return operand;
    }

    static std::optional<int32_t> dtype_of(const dlpack::DType& dtype) {
        if (dtype.lanes != 1) return std::nullopt;
        if (dtype.code == dlpack::bfloat && dtype.bits == 16) return TS_BFLOAT16;
        if (dtype.code != dlpack::floating) return std::nullopt;
        if (dtype.bits == 16) return TS_FLOAT16;
        return dtype.bits == 32 ? std::optional<int32_t>(TS_FLOAT32) : std::nullopt;
    }

    static int64_t key(const dlpack::Tensor& tensor, int32_t number) {
        return int64_t{tensor.device_type} << 48 | int64_t{tensor.device} << 16 | number;
    }

    nb::object allocate(const nb::object& like, const int64_t* sizes, int32_t dims) const {
        std::array<nb::object, Key::max_dims> numbers;
        std::array<PyObject*, 1 + Key::max_dims> stack{like.ptr()};
        for (int32_t i = 0; i < dims; ++i) {
            numbers[i] = nb::int_(sizes[i]);
            stack[1 + i] = numbers[i].ptr();
        }
        PyObject* made = PyObject_Vectorcall(new_empty_.ptr(), stack.data(), 1 + dims, nullptr);
        if (made == nullptr) throw nb::python_error();
        return nb::steal(made);
    }

    struct Likes {
        nb::object values, scales;
    };

    const Tensors& tensors_;
    nb::object new_empty_;
    std::unordered_map<int64_t, Likes> likes_;
};

}  // namespace

void bind_quantization(nb::module_& m) {
    m.def("quantize", &quantize, "device"_a, "dtype"_a, "quantized_dtype"_a, "tokens"_a, "features"_a, "x"_a,
          "quantized"_a, "scales"_a, "stream"_a, "scales_ld"_a = 0);
    nb::class_<Quantizer>(m, "Quantizer")
        .def(nb::init<const Tensors&>(), nb::keep_alive<1, 2>(), "tensors"_a)
        .def("run", &Quantizer::run, "x"_a, "number"_a)
        .def("keep", &Quantizer::keep, "values"_a, "scales"_a, "number"_a, "new_empty"_a);
}

}  // namespace bindings
