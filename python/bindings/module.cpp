// tilesparse._C: the C ABI for Python, in integers and plain objects. Addresses are integers; only `Tensors`
// and `Calls` know tensors, through DLPack. Errors are raised as the classes of tilesparse.errors.

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dlpack.h"
#include "tilesparse/tilesparse.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

const char* error_class(ts_status_t status) {
    switch (status) {
        case TS_INVALID_ARGUMENT:
        case TS_WORKSPACE_TOO_SMALL:
            return "InvalidArgumentError";
        case TS_INVALID_PATTERN:
            return "InvalidPatternError";
        case TS_UNSUPPORTED:
            return "UnsupportedError";
        case TS_NO_DEVICE:
            return "NoDeviceError";
        case TS_CUDA_ERROR:
            return "CudaError";
        default:
            return "InternalError";
    }
}

void check(ts_status_t status) {
    if (status == TS_SUCCESS) return;
    if (status == TS_OUT_OF_MEMORY) throw std::bad_alloc();
    const nb::object type = nb::module_::import_("tilesparse.errors").attr(error_class(status));
    PyErr_SetString(type.ptr(), ts_last_error());
    throw nb::python_error();
}

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

template <class T>
T make() {
    T value{};
    value.struct_size = sizeof value;
    return value;
}

ts_pattern make_pattern(int32_t block_rows, int32_t block_cols, int64_t out_features, int64_t in_features,
                        int64_t nnz, uintptr_t row_ptr, uintptr_t col_idx, uintptr_t row_slot,
                        uintptr_t col_ptr, uintptr_t row_idx, uintptr_t col_slot) {
    auto pattern = make<ts_pattern>();
    pattern.block_rows = block_rows;
    pattern.block_cols = block_cols;
    pattern.out_features = out_features;
    pattern.in_features = in_features;
    pattern.nnz = nnz;
    pattern.row_ptr = pointer<int32_t>(row_ptr);
    pattern.col_idx = pointer<int32_t>(col_idx);
    pattern.row_slot = pointer<int32_t>(row_slot);
    pattern.col_ptr = pointer<int32_t>(col_ptr);
    pattern.row_idx = pointer<int32_t>(row_idx);
    pattern.col_slot = pointer<int32_t>(col_slot);
    return pattern;
}

// Copies a text into a field, and leaves a zero behind it; what is too long is no name.
template <size_t size>
void copy_text(char (&target)[size], const std::string& source, const char* name) {
    if (source.size() >= size)
        throw nb::value_error((std::string(name) + ": at most " + std::to_string(size - 1) +
                               " bytes expected, got " + std::to_string(source.size()))
                                  .c_str());
    source.copy(target, size - 1);
}

ts_device_info make_device(int32_t device, int32_t compute_capability, int32_t multiprocessors,
                           int32_t shared_memory, const std::string& name) {
    auto info = make<ts_device_info>();
    copy_text(info.name, name, "name");
    info.device = device;
    info.compute_capability = compute_capability;
    info.multiprocessors = multiprocessors;
    info.shared_memory = shared_memory;
    return info;
}

ts_device_info device_info(int32_t device, int32_t ordinal) {
    auto info = make<ts_device_info>();
    check(ts_device_get(device, ordinal, &info));
    return info;
}

std::vector<ts_kernel_info> kernels() {
    std::vector<ts_kernel_info> all(ts_kernel_count(), make<ts_kernel_info>());
    for (size_t i = 0; i < all.size(); ++i) check(ts_kernel_get(static_cast<int32_t>(i), &all[i]));
    return all;
}

// Whether arrays in host memory hold what the pattern's own do.
bool pattern_holds(const ts_pattern& pattern, uintptr_t row_ptr, uintptr_t col_idx, uintptr_t row_slot) {
    const auto same = [](const int32_t* own, uintptr_t other, int64_t count) {
        return std::equal(own, own + count, pointer<int32_t>(other));
    };
    return same(pattern.row_ptr, row_ptr, pattern.out_features / pattern.block_rows + 1) &&
           same(pattern.col_idx, col_idx, pattern.nnz) && same(pattern.row_slot, row_slot, pattern.nnz);
}

// `pairs`: the address of ts_array_pairs in pinned memory.
void arrays_compare(uintptr_t pairs, int32_t count, int64_t mark, uintptr_t stream) {
    check(ts_arrays_compare(pointer<ts_array_pair>(pairs), count, mark, pointer<CUstream_st>(stream)));
}

// Whether one of them has a mark.
bool arrays_differ(uintptr_t pairs, int32_t count) {
    const auto* first = pointer<const volatile ts_array_pair>(pairs);
    return std::any_of(first, first + count,
                       [](const volatile ts_array_pair& pair) { return pair.differs != 0; });
}

void pattern_transpose(const ts_pattern& pattern, uintptr_t col_ptr, uintptr_t row_idx, uintptr_t col_slot) {
    check(ts_pattern_transpose(&pattern, pointer<int32_t>(col_ptr), pointer<int32_t>(row_idx),
                               pointer<int32_t>(col_slot)));
}

int64_t plan_key(const ts_pattern& pattern, int32_t kernel, int32_t op) {
    int64_t key = 0;
    check(ts_plan_key(&pattern, kernel, op, &key));
    return key;
}

size_t plan_size(const ts_pattern& pattern, int32_t kernel, int32_t op) {
    size_t bytes = 0;
    check(ts_plan_size(&pattern, kernel, op, &bytes));
    return bytes;
}

void plan_build(const ts_pattern& pattern, int32_t kernel, int32_t op, uintptr_t address, size_t bytes) {
    check(ts_plan_build(&pattern, kernel, op, pointer<void>(address), bytes));
}

std::pair<size_t, size_t> plan_device_size(const ts_pattern& pattern, int32_t kernel, int32_t op) {
    size_t plan = 0, workspace = 0;
    check(ts_plan_device_size(&pattern, kernel, op, &plan, &workspace));
    return {plan, workspace};
}

void plan_device_build(const ts_pattern& pattern, int32_t kernel, int32_t op, uintptr_t plan,
                       size_t plan_bytes, uintptr_t workspace, size_t workspace_bytes, uintptr_t stream) {
    check(ts_plan_device_build(&pattern, kernel, op, pointer<void>(plan), plan_bytes,
                               pointer<void>(workspace), workspace_bytes, pointer<CUstream_st>(stream)));
}

size_t pattern_device_transpose_size(const ts_pattern& pattern) {
    size_t bytes = 0;
    check(ts_pattern_device_transpose_size(&pattern, &bytes));
    return bytes;
}

void pattern_device_transpose(const ts_pattern& pattern, uintptr_t col_ptr, uintptr_t row_idx,
                              uintptr_t col_slot, uintptr_t workspace, size_t workspace_bytes,
                              uintptr_t stream) {
    check(ts_pattern_device_transpose(&pattern, pointer<int32_t>(col_ptr), pointer<int32_t>(row_idx),
                                      pointer<int32_t>(col_slot), pointer<void>(workspace), workspace_bytes,
                                      pointer<CUstream_st>(stream)));
}

// One product but for the addresses of its operands: what stays the same from call to call. Kept by those who
// make it together with the memory it names.
class Product {
  public:
    Product(const ts_pattern& pattern, int32_t op, int32_t dtype, int32_t device, int64_t tokens,
            int32_t activation, int32_t precision, bool accumulate, int32_t kernel, int32_t policy,
            int32_t x_layout, int64_t ldx, int32_t y_layout, int64_t ldy, bool residual, int64_t ldr,
            int32_t storage, int32_t values_dtype, bool row_scales, int32_t result_dtype,
            const std::string& prefer, bool gated, bool bias_gradient, int32_t bias_gradient_dtype,
            bool accumulate_bias)
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
        copy_text(desc_.prefer, prefer, "prefer");
    }

    // The kernel for that device, or TS_EXPAND_AND_RUN_DENSE, and why.
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

    // The expansion of values, which have no metadata or scales where their addresses are 0.
    void expand(uintptr_t values, uintptr_t metadata, uintptr_t scales, uintptr_t plain, size_t bytes,
                uintptr_t stream) const {
        auto desc = described();
        use_values(desc, values, metadata, scales);
        check(ts_values_expand(&desc, pointer<void>(plain), bytes, pointer<CUstream_st>(stream)));
    }

    // `bias`: of TS_SDD_TN its gradient.
    void run(uintptr_t x, uintptr_t y, uintptr_t values, uintptr_t bias, uintptr_t residual,
             uintptr_t workspace, uintptr_t stream, uintptr_t metadata, uintptr_t scales) const {
        ts_matmul_desc desc = described();
        desc.x.data = pointer<void>(x);
        desc.y.data = pointer<void>(y);
        use_values(desc, values, metadata, scales);
        if (desc.op == TS_SDD_TN)
            desc.bias_gradient = pointer<void>(bias);
        else
            desc.bias = pointer<void>(bias);
        other(desc).data = pointer<void>(residual);
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

void values_compress(const ts_pattern& pattern, int32_t device, int32_t dtype, uintptr_t values,
                     uintptr_t mask, bool transposed, uintptr_t compressed, uintptr_t metadata,
                     uintptr_t stream) {
    check(ts_values_compress(&pattern, device, dtype, pointer<void>(values), pointer<uint8_t>(mask),
                             transposed, pointer<void>(compressed), pointer<uint32_t>(metadata),
                             pointer<CUstream_st>(stream)));
}

size_t activation_gradient_workspace_size(int32_t dtype, int64_t tokens, int64_t features) {
    size_t bytes = 0;
    check(ts_activation_gradient_workspace_size(dtype, tokens, features, &bytes));
    return bytes;
}

void activation_gradient(int32_t dtype, int32_t activation, int64_t tokens, int64_t features, uintptr_t z,
                         uintptr_t gradient, uintptr_t result, uintptr_t bias_gradient, uintptr_t workspace,
                         size_t workspace_bytes, uintptr_t stream) {
    check(ts_activation_gradient(dtype, activation, tokens, features, pointer<void>(z),
                                 pointer<void>(gradient), pointer<void>(result), pointer<void>(bias_gradient),
                                 pointer<void>(workspace), workspace_bytes, pointer<CUstream_st>(stream)));
}

// The address of a row-major matrix, and the elements from one row to the next.
using Rows = std::pair<uintptr_t, int64_t>;

ts_matrix row_major(const Rows& rows) { return {pointer<void>(rows.first), rows.second, TS_ROW_MAJOR, 0}; }

void gate(int32_t dtype, int32_t activation, int64_t tokens, int64_t features, Rows gate, Rows factor,
          Rows result, uintptr_t stream) {
    const ts_matrix matrices[] = {row_major(gate), row_major(factor), row_major(result)};
    check(ts_gate(dtype, activation, tokens, features, &matrices[0], &matrices[1], &matrices[2],
                  pointer<CUstream_st>(stream)));
}

void gate_gradient(int32_t dtype, int32_t activation, int64_t tokens, int64_t features, Rows gate,
                   Rows factor, Rows gradient, Rows gate_gradient, Rows factor_gradient, uintptr_t stream) {
    const ts_matrix matrices[] = {row_major(gate), row_major(factor), row_major(gradient),
                                  row_major(gate_gradient), row_major(factor_gradient)};
    check(ts_gate_gradient(dtype, activation, tokens, features, &matrices[0], &matrices[1], &matrices[2],
                           &matrices[3], &matrices[4], pointer<CUstream_st>(stream)));
}

using AnyTuple = nb::typed<nb::tuple, nb::any, nb::ellipsis>;

// What PyTorch says of its tensors and settings. Through Python's attributes it takes several times as long.
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

    // How often a tensor was written to, as far as PyTorch counts; 0 where it does not.
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

uintptr_t address(const dlpack::Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
}

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
    std::array<int64_t, 3 + 6 * (2 + 2 * max_dims)> words_;  // settings, and up to six tensors
    size_t size_ = 0;
};

struct KeyHash {
    size_t operator()(const Key& key) const { return key.hash(); }
};

// How often the patterns of a device were looked at for writes that PyTorch does not count.
struct Looks {
    uint64_t count = 0;
};

// The objects made for patterns, given as (crow_indices, col_indices, slot, shape, block_shape): on CUDA
// devices for as long as these tensors lie where they did and are not written to, on the CPU for as long as
// they hold what the object has copies of, which does not depend on who writes to them, and how.
class Known {
  public:
    explicit Known(const Tensors& tensors) : tensors_(tensors) {}

    // What is kept for a pattern, or None. With `looking` also where it was found so since the last look at
    // the patterns of its device: then it is time for another one.
    std::optional<nb::any> find(const AnyTuple& index, bool looking) {
        const auto found = objects_.find(key(index));
        State now;
        if (found == objects_.end() || !read(index, now)) return std::nullopt;
        auto& [object, state, looks, seen] = found->second;
        if (!state.is_same(now)) return std::nullopt;
        if (looking && looks != nullptr && std::exchange(seen, looks->count) == looks->count)
            return std::nullopt;
        return object;
    }

    // `copies`: the addresses of the three copies that an object has on the CPU. `looks`: at its device.
    void keep(const AnyTuple& index, nb::any object, std::optional<std::array<uintptr_t, 3>> copies,
              const Looks* looks) {
        State state;
        forget(index);
        if (!read(index, state) || copies.has_value() != state.on_cpu) return;
        if (copies) state.at = *copies;
        objects_.emplace(key(index), Object{std::move(object), state, looks, looks ? looks->count : 0});
    }

    // To be called when one of the tensors is gone, with their `id` in place of them.
    void forget(const AnyTuple& ids) {
        const auto dropped = objects_.extract(key(ids));  // the end of an object may lead back here
    }

  private:
    struct State {
        std::array<uintptr_t, 3> at;  // where the tensors lie, or the copies on the CPU
        std::array<int64_t, 3> sizes;
        std::array<uint64_t, 3> versions;  // how often each was written to; not read on the CPU
        bool on_cpu;

        bool is_same(const State& now) const {
            if (sizes != now.sizes || on_cpu != now.on_cpu) return false;
            if (!on_cpu) return at == now.at && versions == now.versions;
            for (size_t i = 0; i < 3; ++i)
                if (!std::equal(pointer<int32_t>(at[i]), pointer<int32_t>(at[i]) + sizes[i],
                                pointer<int32_t>(now.at[i])))
                    return false;
            return true;
        }
    };

    struct Object {
        nb::any object;
        State state;
        const Looks* looks;  // of the object's device; null on the CPU
        uint64_t seen;       // looks when the object was found last
    };

    static Key key(const AnyTuple& index) {
        Key key;
        for (size_t i = 0; i < 3; ++i) {
            const nb::handle tensor = index[i];
            const bool is_id = PyLong_CheckExact(tensor.ptr());
            key.add(is_id ? nb::cast<int64_t>(tensor) : reinterpret_cast<int64_t>(tensor.ptr()));
        }
        for (size_t i = 3; i < 5; ++i) {
            const auto [rows, cols] = nb::cast<std::pair<int64_t, int64_t>>(index[i]);
            key.add(rows);
            key.add(cols);
        }
        return key;
    }

    // False for what is no index. Of tensors made in inference mode writes are not counted.
    bool read(const AnyTuple& index, State& state) const {
        state = {};
        for (size_t i = 0; i < 3; ++i) {
            const nb::handle object = index[i];
            dlpack::Tensor tensor;
            if (!tensors_.read(object, tensor) || tensor.dims != 1 || tensor.strides[0] != 1 ||
                tensor.dtype.bits != 32)
                return false;
            state.on_cpu = tensor.device_type == dlpack::cpu;
            state.at[i] = address(tensor);
            state.sizes[i] = tensor.sizes[0];
            if (!state.on_cpu) state.versions[i] = tensors_.read_version(object);
        }
        return true;
    }

    const Tensors& tensors_;
    std::unordered_map<Key, Object, KeyHash> objects_;
};

// What a product is asked to do, but for its pattern: x and values for TS_DDS_NT, y and values for TS_DDS_NN,
// y and x for TS_SDD_TN. What follows them may be None.
struct Request {
    int32_t op;
    nb::handle first, second, bias, residual;
    int32_t activation;
    bool feature_major;
    nb::handle metadata, scales;  // of values
    int32_t kernel;               // as in ts_matmul_desc
    bool gated;                   // the residual is a gate
};

// A request in the terms of the C ABI.
struct Operands {
    Key key;
    uintptr_t first = 0, second = 0, bias = 0, residual = 0, metadata = 0, scales = 0, stream = 0;

    // False for what is out of the ordinary.
    bool read(const Tensors& tensors, const Request& request) {
        dlpack::Tensor like, other;
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
            if ((first | second | residual | metadata) % alignment != 0 ||
                !tensors.is_on_current_device(like))
                return false;
            stream = tensors.current_stream(like);
            tf32 = tensors.multiplies_in_tf32(like);
        }
        key.add(static_cast<int64_t>(stream));
        key.add(request.op | request.activation << 8 | request.feature_major << 16 | tf32 << 17 |
                request.gated << 18);
        key.add(request.kernel);
        return true;
    }

  private:
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

// How to make a tensor: a method of PyTorch's tensors, and its arguments.
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

// The products of one pattern that have run, so that to run one again takes one look-up. What is out of the
// ordinary is not kept: more dimensions, operands that must be copied, another device than the current one.
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
        auto result = nb::borrow<nb::any>(call->result(request.first));
        const nb::object workspace = call->workspace(request.first);
        const uintptr_t result_at = at(result), workspace_at = workspace.is_valid() ? at(workspace) : 0;
        // Another thread may have run meanwhile. If it has, the pattern is being updated.
        if (cleared != cleared_) return std::nullopt;
        const auto& [key, first, second, bias, residual, metadata, scales, stream] = operands;
        if (request.op == TS_DDS_NT)
            call->product.run(first, result_at, second, bias, residual, workspace_at, stream, metadata,
                              scales);
        else if (request.op == TS_DDS_NN)
            call->product.run(result_at, first, second, 0, 0, workspace_at, stream, metadata, scales);
        else
            call->product.run(second, first, result_at, 0, 0, workspace_at, stream, 0, 0);
        return result;
    }

    // Runs such products in this way from now on.
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

    uintptr_t at(nb::handle object) const {
        dlpack::Tensor tensor;
        if (!tensors_.read(object, tensor)) throw nb::type_error("a plain tensor expected of PyTorch");
        return address(tensor);
    }

    const Tensors& tensors_;
    std::unordered_map<Key, std::shared_ptr<const Call>, KeyHash> calls_;
    uint64_t cleared_ = 0;  // how often
};

// The files of all libtilesparse that this process has loaded.
std::vector<std::string> libraries() {
    std::vector<std::string> found;
    const auto look = [](dl_phdr_info* info, size_t, void* data) {
        const std::string_view path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        if (path.substr(path.rfind('/') + 1).starts_with("libtilesparse"))
            static_cast<std::vector<std::string>*>(data)->emplace_back(path);
        return 0;
    };
    dl_iterate_phdr(look, &found);
    return found;
}

// What the loader has found need not be the library that this module was built with: LD_LIBRARY_PATH comes
// before the package's own folder, and a program may have loaded one of its own.
void check_library() {
    if (std::string_view(ts_version()) == TS_VERSION && ts_abi_version() == TS_ABI_VERSION) return;
    Dl_info info{};
    dladdr(reinterpret_cast<const void*>(&ts_version), &info);
    const std::string text =
        std::string("the library ") + (info.dli_fname == nullptr ? "libtilesparse" : info.dli_fname) +
        " is tilesparse " + ts_version() + " (ABI " + std::to_string(ts_abi_version()) +
        "), and this Python package is " TS_VERSION " (ABI " + std::to_string(TS_ABI_VERSION) +
        "); install the package again, and see that neither LD_LIBRARY_PATH nor the "
        "program that Python runs in brings another libtilesparse";
    throw nb::import_error(text.c_str());
}

}  // namespace

NB_MODULE(_C, m) {
    m.doc() = "The C ABI of TileSparse in integers and plain objects.";
    nb::set_leak_warnings(false);  // a descriptor may live as long as the interpreter

    nb::class_<ts_pattern>(m, "Pattern")
        .def(
            "__init__",
            [](ts_pattern* self, int32_t block_rows, int32_t block_cols, int64_t out_features,
               int64_t in_features, int64_t nnz, uintptr_t row_ptr, uintptr_t col_idx, uintptr_t row_slot,
               uintptr_t col_ptr, uintptr_t row_idx, uintptr_t col_slot) {
                new (self) ts_pattern(make_pattern(block_rows, block_cols, out_features, in_features, nnz,
                                                   row_ptr, col_idx, row_slot, col_ptr, row_idx, col_slot));
            },
            "block_rows"_a, "block_cols"_a, "out_features"_a, "in_features"_a, "nnz"_a, "row_ptr"_a,
            "col_idx"_a, "row_slot"_a, "col_ptr"_a = 0, "row_idx"_a = 0, "col_slot"_a = 0);

    nb::class_<ts_device_info>(m, "DeviceInfo")
        .def(
            "__init__",
            [](ts_device_info* self, int32_t device, int32_t compute_capability, int32_t multiprocessors,
               int32_t shared_memory, const std::string& name) {
                new (self) ts_device_info(
                    make_device(device, compute_capability, multiprocessors, shared_memory, name));
            },
            "device"_a, "compute_capability"_a, "multiprocessors"_a, "shared_memory"_a, "name"_a = "")
        .def_ro("device", &ts_device_info::device)
        .def_ro("compute_capability", &ts_device_info::compute_capability)
        .def_ro("multiprocessors", &ts_device_info::multiprocessors)
        .def_ro("shared_memory", &ts_device_info::shared_memory)
        .def_prop_ro("name", [](const ts_device_info& self) { return std::string(self.name); });

    nb::class_<ts_kernel_info>(m, "KernelInfo")
        .def_ro("device", &ts_kernel_info::device)
        .def_ro("min_compute_capability", &ts_kernel_info::min_compute_capability)
        .def_ro("ops", &ts_kernel_info::ops)
        .def_ro("dtypes", &ts_kernel_info::dtypes)
        .def_ro("precision", &ts_kernel_info::precision)
        .def_ro("plan", &ts_kernel_info::plan)
        .def_ro("tile_tokens", &ts_kernel_info::tile_tokens)
        .def_ro("tile_features", &ts_kernel_info::tile_features)
        .def_ro("max_tokens", &ts_kernel_info::max_tokens)
        .def_ro("storages", &ts_kernel_info::storages)
        .def_ro("values_dtypes", &ts_kernel_info::values_dtypes)
        .def_ro("result_dtypes", &ts_kernel_info::result_dtypes)
        .def_prop_ro("name", [](const ts_kernel_info& self) { return std::string(self.name); });

    nb::class_<Product>(m, "Product")
        .def(nb::init<const ts_pattern&, int32_t, int32_t, int32_t, int64_t, int32_t, int32_t, bool, int32_t,
                      int32_t, int32_t, int64_t, int32_t, int64_t, bool, int64_t, int32_t, int32_t, bool,
                      int32_t, const std::string&, bool, bool, int32_t, bool>(),
             "pattern"_a, "op"_a, "dtype"_a, "device"_a, "tokens"_a, nb::kw_only(), "activation"_a = 0,
             "precision"_a = 0, "accumulate"_a = false, "kernel"_a = 0, "policy"_a = 0, "x_layout"_a = 0,
             "ldx"_a = 0, "y_layout"_a = 0, "ldy"_a = 0, "residual"_a = false, "ldr"_a = 0, "storage"_a = 0,
             "values_dtype"_a = -1, "row_scales"_a = false, "result_dtype"_a = -1, "prefer"_a = "",
             "gated"_a = false, "bias_gradient"_a = false, "bias_gradient_dtype"_a = -1,
             "accumulate_bias"_a = false)
        .def("estimate", &Product::estimate, "device_info"_a, "kernel"_a)
        .def("add_measurement", &Product::add_measurement, "device_info"_a, "kernel"_a, "microseconds"_a,
             "dense_microseconds"_a)
        .def("select", &Product::select, "device_info"_a)
        .def("resolve", &Product::resolve)
        .def("use_plan", &Product::use_plan, "plan"_a, "bytes"_a, "key"_a)
        .def("packed_size", &Product::packed_size)
        .def("pack", &Product::pack, "values"_a, "packed"_a, "bytes"_a, "stream"_a)
        .def("use_packed", &Product::use_packed, "packed"_a, "bytes"_a, "key"_a)
        .def("workspace_size", &Product::workspace_size)
        .def("expand", &Product::expand, "values"_a, "metadata"_a, "scales"_a, "plain"_a, "bytes"_a,
             "stream"_a)
        .def("run", &Product::run, "x"_a, "y"_a, "values"_a, "bias"_a, "residual"_a, "workspace"_a,
             "stream"_a, "metadata"_a = 0, "scales"_a = 0);

    nb::class_<Tensors>(m, "Tensors")
        .def_rw("enabled", &Tensors::enabled)
        .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object>(), "exchange"_a.none(),
             "tensor_type"_a, "parameter_type"_a, "current_device"_a.none(), "tf32"_a);

    nb::class_<Looks>(m, "Looks").def(nb::init<>()).def("add", [](Looks& self) { ++self.count; });

    nb::class_<Known>(m, "Known")
        .def(nb::init<const Tensors&>(), nb::keep_alive<1, 2>(), "tensors"_a)
        .def("find", &Known::find, "index"_a, "looking"_a)
        .def("keep", &Known::keep, "index"_a, "object"_a, "copies"_a.none(), "looks"_a.none(),
             nb::keep_alive<1, 5>())
        .def("forget", &Known::forget, "ids"_a);

    nb::class_<Calls>(m, "Calls")
        .def(nb::init<const Tensors&>(), nb::keep_alive<1, 2>(), "tensors"_a)
        .def(
            "run",
            [](const Calls& self, int32_t op, nb::handle first, nb::handle second, nb::handle bias,
               nb::handle residual, int32_t activation, bool feature_major, nb::handle metadata,
               nb::handle scales, int32_t kernel, bool gated) {
                return self.run({op, first, second, bias, residual, activation, feature_major, metadata,
                                 scales, kernel, gated});
            },
            "op"_a, "first"_a, "second"_a, "bias"_a.none(), "residual"_a.none(), "activation"_a,
            "feature_major"_a, "metadata"_a.none(), "scales"_a.none(), "kernel"_a, "gated"_a)
        .def(
            "keep",
            [](Calls& self, int32_t op, nb::handle first, nb::handle second, nb::handle bias,
               nb::handle residual, int32_t activation, bool feature_major, nb::handle metadata,
               nb::handle scales, int32_t kernel, bool gated, const Product& product,
               std::pair<nb::object, AnyTuple> result,
               std::optional<std::pair<nb::object, AnyTuple>> workspace) {
                self.keep({op, first, second, bias, residual, activation, feature_major, metadata, scales,
                           kernel, gated},
                          product, {result.first, result.second},
                          workspace ? Allocation{workspace->first, workspace->second} : Allocation{});
            },
            "op"_a, "first"_a, "second"_a, "bias"_a.none(), "residual"_a.none(), "activation"_a,
            "feature_major"_a, "metadata"_a.none(), "scales"_a.none(), "kernel"_a, "gated"_a, "product"_a,
            "result"_a, "workspace"_a.none())
        .def("clear", &Calls::clear)
        .def("__len__", &Calls::size);

    check_library();
    m.def("libraries", &libraries);
    m.def("measurements_clear", [] { check(ts_measurements_clear()); });
    m.def("version", [] { return std::string(ts_version()); });
    m.def("abi_version", &ts_abi_version);
    m.def("architectures", [] { return std::string(ts_architectures()); });
    m.def("kernels", &kernels);
    m.def("device_info", &device_info, "device"_a, "ordinal"_a = -1);
    m.def(
        "pattern_validate", [](const ts_pattern& pattern) { check(ts_pattern_validate(&pattern)); },
        "pattern"_a);
    m.def("arrays_compare", &arrays_compare, "pairs"_a, "count"_a, "mark"_a, "stream"_a);
    m.def("arrays_differ", &arrays_differ, "pairs"_a, "count"_a);
    m.def("pattern_holds", &pattern_holds, "pattern"_a, "row_ptr"_a, "col_idx"_a, "row_slot"_a);
    m.def("pattern_transpose", &pattern_transpose, "pattern"_a, "col_ptr"_a, "row_idx"_a, "col_slot"_a);
    m.def("values_compress", &values_compress, "pattern"_a, "device"_a, "dtype"_a, "values"_a, "mask"_a,
          "transposed"_a, "compressed"_a, "metadata"_a, "stream"_a);
    m.def("activation_gradient_workspace_size", &activation_gradient_workspace_size, "dtype"_a, "tokens"_a,
          "features"_a);
    m.def("activation_gradient", &activation_gradient, "dtype"_a, "activation"_a, "tokens"_a, "features"_a,
          "z"_a, "gradient"_a, "result"_a, "bias_gradient"_a, "workspace"_a, "workspace_bytes"_a, "stream"_a);
    m.def("gate", &gate, "dtype"_a, "activation"_a, "tokens"_a, "features"_a, "gate"_a, "factor"_a,
          "result"_a, "stream"_a);
    m.def("gate_gradient", &gate_gradient, "dtype"_a, "activation"_a, "tokens"_a, "features"_a, "gate"_a,
          "factor"_a, "gradient"_a, "gate_gradient"_a, "factor_gradient"_a, "stream"_a);
    m.def("plan_key", &plan_key, "pattern"_a, "kernel"_a, "op"_a);
    m.def("plan_size", &plan_size, "pattern"_a, "kernel"_a, "op"_a);
    m.def("plan_build", &plan_build, "pattern"_a, "kernel"_a, "op"_a, "address"_a, "bytes"_a);
    m.def("plan_device_size", &plan_device_size, "pattern"_a, "kernel"_a, "op"_a);
    m.def("plan_device_build", &plan_device_build, "pattern"_a, "kernel"_a, "op"_a, "plan"_a, "plan_bytes"_a,
          "workspace"_a, "workspace_bytes"_a, "stream"_a);
    m.def("pattern_device_transpose_size", &pattern_device_transpose_size, "pattern"_a);
    m.def("pattern_device_transpose", &pattern_device_transpose, "pattern"_a, "col_ptr"_a, "row_idx"_a,
          "col_slot"_a, "workspace"_a, "workspace_bytes"_a, "stream"_a);
}
