// PyTorch's tensors through DLPack, and keys made of what they are.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "dlpack.h"
#include "support.h"

namespace bindings {

inline uintptr_t address(const dlpack::Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
}

// Reads PyTorch's tensors and settings. Python's attributes take several times as long.
class Tensors {
  public:
    bool enabled = true;  // false has everything take the way without it, for tests

    // Without an exchange, or one of DLPack 1, nothing can be read.
    Tensors(nb::object exchange, nb::object tensor_type, nb::object parameter_type, nb::object current_device,
            nb::object tf32)
        : tensor_type_(std::move(tensor_type)),
          parameter_type_(std::move(parameter_type)),
          current_device_(std::move(current_device)),
          tf32_(std::move(tf32)) {
        if (exchange.is_none()) return;
        void* offered = PyCapsule_GetPointer(exchange.ptr(), "dlpack_exchange_api");
        if (offered == nullptr) throw nb::python_error();
        exchange_ = static_cast<const dlpack::Exchange*>(offered);
        while (exchange_ != nullptr &&
               (exchange_->major != dlpack::major_version || exchange_->read == nullptr))
            exchange_ = exchange_->older;
    }

    // False for all but plain tensors on the CPU or CUDA devices. Subclasses may have any behaviour.
    bool read(nb::handle object, dlpack::Tensor& tensor) const {
        const nb::handle type = object.type();
        if (!enabled || exchange_ == nullptr) return false;
        if (!type.is(tensor_type_) && !type.is(parameter_type_)) return false;
        if (exchange_->read(object.ptr(), &tensor) != 0) {
            PyErr_Clear();
            return false;
        }
        return tensor.device_type == dlpack::cpu || tensor.device_type == dlpack::cuda;
    }

    // The address of a tensor that was allocated here.
    uintptr_t address_of(nb::handle object) const {
        dlpack::Tensor tensor;
        if (!read(object, tensor))
            throw nb::type_error("an allocation must be a torch.Tensor on the CPU or a CUDA device");
        return address(tensor);
    }

    // The version of a tensor, which PyTorch counts up with every write; 0 where it does not count.
    uint64_t read_version(nb::handle tensor) const {
        PyObject* number = PyObject_GetAttr(tensor.ptr(), version_.ptr());
        const uint64_t version = number == nullptr ? 0 : nb::cast<uint64_t>(nb::steal(number));
        PyErr_Clear();
        return version;
    }

    uintptr_t current_stream(const dlpack::Tensor& tensor) const {
        void* stream = nullptr;
        if (exchange_->current_stream(tensor.device_type, tensor.device, &stream) != 0)
            throw nb::python_error();
        return reinterpret_cast<uintptr_t>(stream);
    }

    bool is_on_current_device(const dlpack::Tensor& tensor) const {
        return nb::cast<int32_t>(current_device_()) == tensor.device;
    }

    bool multiplies_in_tf32(const dlpack::Tensor& tensor) const {
        const bool is_float = tensor.dtype.code == dlpack::floating && tensor.dtype.bits == 32;
        return is_float && nb::cast<bool>(tf32_());
    }

  private:
    const dlpack::Exchange* exchange_ = nullptr;
    nb::object tensor_type_, parameter_type_, current_device_, tf32_;
    nb::object version_ = nb::steal(PyUnicode_InternFromString("_version"));
};

// All that decides whether a product can run, and how, but for the alignment of its operands.
class Key {
  public:
    static constexpr int32_t max_dims = 4;

    void add(int64_t word) { words_[size_++] = word; }

    void add(const dlpack::Tensor& tensor) {
        const auto [code, bits, lanes] = tensor.dtype;
        add(tensor.dims | int64_t{code} << 8 | int64_t{bits} << 16 | int64_t{lanes} << 24);
        add(int64_t{tensor.device_type} << 32 | tensor.device);
        for (int32_t i = 0; i < tensor.dims; ++i) {
            add(tensor.sizes[i]);
            add(tensor.strides[i]);
        }
    }

    bool operator==(const Key& other) const {
        return size_ == other.size_ &&
               std::equal(words_.begin(), words_.begin() + size_, other.words_.begin());
    }

    size_t hash() const {
        uint64_t hash = 0;
        for (size_t i = 0; i < size_; ++i) {
            hash = (hash ^ static_cast<uint64_t>(words_[i])) * 0x9e3779b97f4a7c15;
            hash ^= hash >> 32;
        }
        return hash;
    }

  private:
    std::array<int64_t, 3 + 8 * (2 + 2 * max_dims)> words_;  // settings, and up to eight tensors
    size_t size_ = 0;
};

struct KeyHash {
    size_t operator()(const Key& key) const { return key.hash(); }
};

}  // namespace bindings
