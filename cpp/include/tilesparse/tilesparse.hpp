// TileSparse for C++17: owners, typed spans and exceptions over the C interface. docs/cpp-api.md shows whole
// programs, tilesparse.h says what products compute and what their operands must be.
//
//     const auto pattern = tilesparse::Pattern::from_mask({1, 1, 0, 1}, {64, 64}, {32, 32});
//     tilesparse::Product product(tilesparse::Op::dds_nt, pattern, tokens);
//     product.x(x).values(values).bias(bias).y(y).run();  // std::vector<float>, on the CPU
//
// The header includes no CUDA header and is all there is: programs link the C library alone. Memory of a
// device is allocated and filled by a class of the caller's, see Memory below.
//
// Rules that hold for everything here:
//  - What fails throws an Error, of one class per cause, whose text names the argument, its value and what is
//    allowed. Nothing has been written then.
//  - A Product refers to its pattern and operands and owns none of them: they live until after its last call.
//  - Different objects may be used by different threads; one object by one thread at a time.
//  - Nothing allocates device memory but the constructors of Buffer, DevicePattern and Plan. Nothing waits
//  for
//    a device unless the caller's Memory does.
#ifndef TILESPARSE_TILESPARSE_HPP_
#define TILESPARSE_TILESPARSE_HPP_

#include <tilesparse/tilesparse.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace tilesparse {
// Of this version, so that libraries of one process may be compiled with different ones.
inline namespace v0_1 {

// --- Errors ----------------------------------------------------------------------------------------------

class Error : public std::runtime_error {
  public:
    Error(ts_status_t status, const std::string& text) : std::runtime_error(text), status_(status) {}
    ts_status_t status() const noexcept { return status_; }

  private:
    ts_status_t status_;
};

class InvalidArgumentError : public Error {
  public:
    explicit InvalidArgumentError(const std::string& text)
        : InvalidArgumentError(TS_INVALID_ARGUMENT, text) {}

  protected:
    using Error::Error;
};

// The arrays of a pattern break one of its rules.
class InvalidPatternError : public InvalidArgumentError {
  public:
    explicit InvalidPatternError(const std::string& text) : InvalidArgumentError(TS_INVALID_PATTERN, text) {}
};

// Valid, but no kernel of the library computes it on that device.
class UnsupportedError : public Error {
  public:
    explicit UnsupportedError(const std::string& text) : Error(TS_UNSUPPORTED, text) {}
};

// No usable CUDA device, or a library built without CUDA.
class NoDeviceError : public Error {
  public:
    explicit NoDeviceError(const std::string& text) : Error(TS_NO_DEVICE, text) {}
};

class WorkspaceTooSmallError : public Error {
  public:
    explicit WorkspaceTooSmallError(const std::string& text) : Error(TS_WORKSPACE_TOO_SMALL, text) {}
};

class CudaError : public Error {
  public:
    explicit CudaError(const std::string& text) : Error(TS_CUDA_ERROR, text) {}
};

// Of host memory, within the library. Containers and HostMemory throw std::bad_alloc.
class OutOfMemoryError : public Error {
  public:
    explicit OutOfMemoryError(const std::string& text) : Error(TS_OUT_OF_MEMORY, text) {}
};

// A defect of the library, or a status that this header does not know.
class InternalError : public Error {
  public:
    explicit InternalError(const std::string& text) : Error(TS_INTERNAL_ERROR, text) {}
};

// The library that is loaded has another ABI than the header the program was compiled with.
class VersionError : public Error {
  public:
    explicit VersionError(const std::string& text) : Error(TS_UNSUPPORTED, text) {}
};

// Throws the error of a status that is not TS_SUCCESS, with this thread's ts_last_error().
inline void check(ts_status_t status) {
    const auto text = [] { return std::string(ts_last_error()); };
    switch (status) {
        case TS_SUCCESS:
            return;
        case TS_INVALID_ARGUMENT:
            throw InvalidArgumentError(text());
        case TS_INVALID_PATTERN:
            throw InvalidPatternError(text());
        case TS_UNSUPPORTED:
            throw UnsupportedError(text());
        case TS_NO_DEVICE:
            throw NoDeviceError(text());
        case TS_WORKSPACE_TOO_SMALL:
            throw WorkspaceTooSmallError(text());
        case TS_CUDA_ERROR:
            throw CudaError(text());
        case TS_OUT_OF_MEMORY:
            throw OutOfMemoryError(text());
        default:
            throw InternalError(text());
    }
}

// Throws VersionError where header and library do not belong together; all that calls the library calls it.
inline void check_version() {
    const int32_t abi = ts_abi_version();
    if (abi == TS_ABI_VERSION) return;
    throw VersionError(
        std::string("this program was compiled with the header of tilesparse " TS_VERSION ", ABI ") +
        std::to_string(TS_ABI_VERSION) + ", but the library that is loaded is " + ts_version() + ", ABI " +
        std::to_string(abi) + "; compile it with the header of that library, or " +
        (abi < TS_ABI_VERSION ? "install a newer library" : "install an older library"));
}

namespace detail {
inline void require(bool holds, const std::string& text) {
    if (!holds) throw InvalidArgumentError(text);
}
inline std::string text(int64_t number) { return std::to_string(number); }
}  // namespace detail

// --- Words -----------------------------------------------------------------------------------------------

enum class Device : int32_t { cpu = TS_CPU, cuda = TS_CUDA };
enum class Op : int32_t { dds_nt = TS_DDS_NT, dds_nn = TS_DDS_NN, sdd_tn = TS_SDD_TN };
enum class Layout : int32_t { row_major = TS_ROW_MAJOR, feature_major = TS_FEATURE_MAJOR };
enum class Activation : int32_t { none = TS_NO_ACTIVATION, relu = TS_RELU, gelu = TS_GELU, silu = TS_SILU };
enum class Precision : int32_t { highest = TS_PRECISION_HIGHEST, tf32 = TS_PRECISION_TF32 };
enum class Policy : int32_t {
    sparse = TS_POLICY_SPARSE,
    automatic = TS_POLICY_AUTO,
    dense = TS_POLICY_DENSE
};
enum class Dtype : int32_t {
    float64 = TS_FLOAT64,
    float32 = TS_FLOAT32,
    float16 = TS_FLOAT16,
    bfloat16 = TS_BFLOAT16,
    int8 = TS_INT8,
    float8_e4m3fn = TS_FLOAT8_E4M3FN
};

// Bytes of one element.
constexpr std::size_t size_of(Dtype dtype) {
    return dtype == Dtype::float64                                 ? 8
           : dtype == Dtype::float32                               ? 4
           : dtype == Dtype::int8 || dtype == Dtype::float8_e4m3fn ? 1
                                                                   : 2;
}

constexpr const char* name_of(Dtype dtype) {
    constexpr const char* kNames[] = {"float64", "float32", "float16", "bfloat16", "int8", "float8_e4m3fn"};
    const auto code = static_cast<std::size_t>(dtype);
    return code < std::size(kNames) ? kNames[code] : "unknown";
}

// Types for memory of dtypes that C++17 lacks.
struct Float16 {
    std::uint16_t bits;
};
struct BFloat16 {
    std::uint16_t bits;
};
struct Float8E4M3 {
    std::uint8_t bits;
};

// The dtype of an element type. Specialise it for others:
//     template <> struct tilesparse::DtypeOf<__nv_bfloat16> : tilesparse::IsDtype<Dtype::bfloat16> {};
template <Dtype dtype>
using IsDtype = std::integral_constant<Dtype, dtype>;
template <class T>
struct DtypeOf;
template <>
struct DtypeOf<double> : IsDtype<Dtype::float64> {};
template <>
struct DtypeOf<float> : IsDtype<Dtype::float32> {};
template <>
struct DtypeOf<Float16> : IsDtype<Dtype::float16> {};
template <>
struct DtypeOf<BFloat16> : IsDtype<Dtype::bfloat16> {};
template <>
struct DtypeOf<std::int8_t> : IsDtype<Dtype::int8> {};
template <>
struct DtypeOf<Float8E4M3> : IsDtype<Dtype::float8_e4m3fn> {};

// --- Memory of others ------------------------------------------------------------------------------------

namespace detail {
// What has data() and size() and lives on: an lvalue, or a span, which has an element_type where owners have
// none.
template <class C, class = void>
struct IsSpan : std::false_type {};
template <class C>
struct IsSpan<C, std::void_t<typename std::remove_reference_t<C>::element_type>> : std::true_type {};
template <class C>
using ElementOf = std::remove_pointer_t<decltype(std::data(std::declval<C&>()))>;
template <class C>
using EnableIfLasting = std::enable_if_t<std::is_lvalue_reference_v<C> || IsSpan<C>::value>;
}  // namespace detail

// Elements that lie next to each other. Made of vectors, arrays, spans and Buffers, but not of temporary
// ones.
template <class T>
class Span {
  public:
    using element_type = T;

    constexpr Span() = default;
    constexpr Span(T* data, std::size_t size) : data_(data), size_(size) {}
    template <class C, class = detail::EnableIfLasting<C>,
              class = std::enable_if_t<std::is_convertible_v<detail::ElementOf<C> (*)[], T (*)[]>>>
    constexpr Span(C&& container) : Span(std::data(container), std::size(container)) {}

    constexpr T* data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr T* begin() const noexcept { return data_; }
    constexpr T* end() const noexcept { return data_ + size_; }
    constexpr T& operator[](std::size_t i) const { return data_[i]; }

  private:
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

// A span whose dtype is known while the program runs, and whether it may be written.
class Array {
  public:
    template <class C, class = detail::EnableIfLasting<C>,
              class = std::enable_if_t<!std::is_same_v<std::decay_t<C>, Array>>,
              class T = detail::ElementOf<C>>
    Array(C&& container) : Array(std::data(container), std::size(container)) {}
    template <class T, class = std::enable_if_t<!std::is_void_v<T>>>
    Array(T* data, std::size_t size) : Array(data, size, DtypeOf<std::remove_const_t<T>>::value) {}
    Array(void* data, std::size_t size, Dtype dtype) : data_(data), size_(size), dtype_(dtype) {}
    Array(const void* data, std::size_t size, Dtype dtype)
        : data_(const_cast<void*>(data)), size_(size), dtype_(dtype), is_const_(true) {}

    void* data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }  // elements
    Dtype dtype() const noexcept { return dtype_; }
    bool is_const() const noexcept { return is_const_; }

  private:
    void* data_;
    std::size_t size_;
    Dtype dtype_;
    bool is_const_ = false;
};

// --- Memory of one's own ---------------------------------------------------------------------------------

// A Memory is a small class that can be copied, with three functions; they throw where they fail:
//
//     void* allocate(std::size_t bytes);      // at least 1, aligned to 256 bytes
//     void deallocate(void*) noexcept;
//     void copy(void* to, const void* from, std::size_t bytes);  // either way; done when it returns
//
// HostMemory is that of the CPU; docs/cpp-api.md has that of the CUDA runtime, in ten lines.
struct HostMemory {
    static void* allocate(std::size_t bytes) { return ::operator new(bytes, std::align_val_t(256)); }
    static void deallocate(void* memory) noexcept { ::operator delete(memory, std::align_val_t(256)); }
    static void copy(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
};

// Owner of `size` elements of a Memory, of any content. Can be moved, not copied.
template <class T, class Memory = HostMemory>
class Buffer {
    static_assert(std::is_trivially_copyable_v<T>);

  public:
    Buffer() : memory_() {}
    explicit Buffer(std::size_t size, Memory memory = Memory()) : memory_(std::move(memory)), size_(size) {
        if (size > SIZE_MAX / sizeof(T)) throw std::bad_array_new_length();
        if (size > 0) data_ = static_cast<T*>(memory_.allocate(bytes()));
    }
    Buffer(Buffer&& other) noexcept
        : memory_(other.memory_),
          data_(std::exchange(other.data_, nullptr)),
          size_(std::exchange(other.size_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        Buffer(std::move(other)).swap(*this);
        return *this;
    }
    ~Buffer() {
        if (data_ != nullptr) memory_.deallocate(data_);
    }

    // With the elements of a host container, or of another buffer of the same Memory.
    static Buffer copy_of(Span<const T> source, Memory memory = Memory()) {
        Buffer buffer(source.size(), std::move(memory));
        if (source.size() > 0) buffer.memory_.copy(buffer.data_, source.data(), buffer.bytes());
        return buffer;
    }
    void copy_to(Span<T> target) const {
        detail::require(target.size() == size_, "target has " + std::to_string(target.size()) +
                                                    " elements; allowed is " + std::to_string(size_) +
                                                    ", the size of the buffer");
        if (size_ > 0) Memory(memory_).copy(target.data(), data_, bytes());
    }

    T* data() noexcept { return data_; }
    const T* data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }
    std::size_t bytes() const noexcept { return size_ * sizeof(T); }

  private:
    void swap(Buffer& other) noexcept {
        std::swap(memory_, other.memory_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }

    Memory memory_;
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

// --- Patterns --------------------------------------------------------------------------------------------

struct Shape {
    std::int64_t out_features, in_features;
};
struct BlockShape {
    std::int32_t rows, cols;  // out, in: each 16, 32, 64 or 128
};

// Which blocks of a weight W [out_features, in_features] are kept, by row and by column, in host memory.
// Checked once, when it is made; it does not change.
class Pattern {
  public:
    // Block compressed rows as in ts_pattern: row_ptr [out_features / rows + 1], col_idx [nnz], ascending in
    // each block row. row_slot [nnz] says where in the values each block lies; without it, in the order of
    // col_idx. Throws InvalidArgumentError or InvalidPatternError.
    Pattern(Shape shape, BlockShape block_shape, std::vector<std::int32_t> row_ptr,
            std::vector<std::int32_t> col_idx, std::vector<std::int32_t> row_slot = {})
        : row_ptr_(std::move(row_ptr)), col_idx_(std::move(col_idx)), row_slot_(std::move(row_slot)) {
        check_version();
        check_shape(shape, block_shape);
        if (row_slot_.empty())
            for (std::size_t e = 0; e < col_idx_.size(); ++e) row_slot_.push_back(static_cast<int32_t>(e));
        c_.struct_size = sizeof c_;
        c_.block_rows = block_shape.rows;
        c_.block_cols = block_shape.cols;
        c_.out_features = shape.out_features;
        c_.in_features = shape.in_features;
        c_.nnz = static_cast<std::int64_t>(col_idx_.size());
        check_size("row_ptr", row_ptr_.size(), shape.out_features / block_shape.rows + 1);
        check_size("row_slot", row_slot_.size(), c_.nnz);
        const ts_pattern rows = c();
        check(ts_pattern_validate(&rows));
        col_ptr_.resize(static_cast<std::size_t>(shape.in_features / block_shape.cols + 1));
        row_idx_.resize(col_idx_.size());
        col_slot_.resize(col_idx_.size());
        check(ts_pattern_transpose(&rows, col_ptr_.data(), row_idx_.data(), col_slot_.data()));
    }

    // The blocks whose entry of `mask` [out_features / rows, in_features / cols], row by row, is not 0.
    static Pattern from_mask(Span<const std::uint8_t> mask, Shape shape, BlockShape block_shape) {
        check_shape(shape, block_shape);
        const std::int64_t rows = shape.out_features / block_shape.rows;
        const std::int64_t cols = shape.in_features / block_shape.cols;
        check_size("mask", mask.size(), rows * cols);
        std::vector<std::int32_t> row_ptr{0}, col_idx;
        const std::uint8_t* entry = mask.data();
        for (std::int64_t row = 0; row < rows; ++row) {
            for (std::int64_t col = 0; col < cols; ++col)
                if (*entry++ != 0) col_idx.push_back(static_cast<std::int32_t>(col));
            row_ptr.push_back(static_cast<std::int32_t>(col_idx.size()));
        }
        return Pattern(shape, block_shape, std::move(row_ptr), std::move(col_idx));
    }
    static Pattern from_mask(std::initializer_list<std::uint8_t> mask, Shape shape, BlockShape block_shape) {
        return from_mask(Span<const std::uint8_t>(mask.begin(), mask.size()), shape, block_shape);
    }

    Shape shape() const { return {c_.out_features, c_.in_features}; }
    BlockShape block_shape() const { return {c_.block_rows, c_.block_cols}; }
    std::int64_t nnz() const { return c_.nnz; }
    // Elements of plain values [nnz, rows, cols].
    std::size_t values_size() const {
        return col_idx_.size() * static_cast<std::size_t>(c_.block_rows) *
               static_cast<std::size_t>(c_.block_cols);
    }
    Span<const std::int32_t> row_ptr() const { return row_ptr_; }
    Span<const std::int32_t> col_idx() const { return col_idx_; }
    Span<const std::int32_t> row_slot() const { return row_slot_; }
    Span<const std::int32_t> col_ptr() const { return col_ptr_; }
    Span<const std::int32_t> row_idx() const { return row_idx_; }
    Span<const std::int32_t> col_slot() const { return col_slot_; }

    // For the functions of tilesparse.h; valid while the pattern stays where it is.
    ts_pattern c() const {
        ts_pattern c = c_;
        c.row_ptr = row_ptr_.data();
        c.col_idx = col_idx_.data();
        c.row_slot = row_slot_.data();
        c.col_ptr = col_ptr_.data();
        c.row_idx = row_idx_.data();
        c.col_slot = col_slot_.data();
        return c;
    }

  private:
    static void check_shape(Shape shape, BlockShape block) {
        detail::require(block.rows > 0 && block.cols > 0, "block_shape is (" + detail::text(block.rows) +
                                                              ", " + detail::text(block.cols) +
                                                              "); allowed are 16, 32, 64 and 128");
        const auto fits = [](std::int64_t features) { return features >= 0 && features <= INT32_MAX; };
        detail::require(fits(shape.out_features) && fits(shape.in_features),
                        "shape is (" + detail::text(shape.out_features) + ", " +
                            detail::text(shape.in_features) + "); allowed are 0 to " +
                            detail::text(INT32_MAX));
    }
    static void check_size(const char* name, std::size_t size, std::int64_t expected) {
        detail::require(size == static_cast<std::uint64_t>(expected),
                        std::string(name) + " has " + std::to_string(size) + " entries; allowed are " +
                            detail::text(expected) + " for this shape");
    }

    ts_pattern c_{};  // without arrays
    std::vector<std::int32_t> row_ptr_, col_idx_, row_slot_, col_ptr_, row_idx_, col_slot_;
};

// A copy of a pattern's arrays in memory of a CUDA device.
template <class Memory>
class DevicePattern {
  public:
    explicit DevicePattern(const Pattern& pattern, const Memory& memory = Memory()) : c_(pattern.c()) {
        const Span<const std::int32_t> sources[] = {pattern.row_ptr(), pattern.col_idx(), pattern.row_slot(),
                                                    pattern.col_ptr(), pattern.row_idx(), pattern.col_slot()};
        const std::int32_t** const targets[] = {&c_.row_ptr, &c_.col_idx, &c_.row_slot,
                                                &c_.col_ptr, &c_.row_idx, &c_.col_slot};
        arrays_.reserve(std::size(sources));
        for (std::size_t i = 0; i < std::size(sources); ++i) {
            arrays_.push_back(Buffer<std::int32_t, Memory>::copy_of(sources[i], memory));
            *targets[i] = arrays_.back().data();
        }
    }

    Shape shape() const { return {c_.out_features, c_.in_features}; }
    BlockShape block_shape() const { return {c_.block_rows, c_.block_cols}; }
    std::int64_t nnz() const { return c_.nnz; }
    const ts_pattern& c() const { return c_; }

  private:
    ts_pattern c_;
    std::vector<Buffer<std::int32_t, Memory>> arrays_;
};

// --- Kernels and devices ---------------------------------------------------------------------------------

// All kernels of the library, in the order of their indices.
inline std::vector<ts_kernel_info> kernels() {
    check_version();
    std::vector<ts_kernel_info> infos(static_cast<std::size_t>(ts_kernel_count()));
    for (std::size_t i = 0; i < infos.size(); ++i) {
        infos[i].struct_size = sizeof infos[i];
        check(ts_kernel_get(static_cast<std::int32_t>(i), &infos[i]));
    }
    return infos;
}

// Properties of the CPU, or of a CUDA device by its ordinal; -1 is the current one. Throws NoDeviceError.
inline ts_device_info device_info(Device device, std::int32_t ordinal = -1) {
    check_version();
    ts_device_info info{};
    info.struct_size = sizeof info;
    check(ts_device_get(static_cast<std::int32_t>(device), ordinal, &info));
    return info;
}

// What would compute a product, and why.
struct Choice {
    std::int32_t kernel;  // an index of kernels(), or TS_EXPAND_AND_RUN_DENSE
    std::string reason;

    bool is_dense() const { return kernel == TS_EXPAND_AND_RUN_DENSE; }
};

// What a kernel for a CUDA device walks: made from a pattern once, for every number of tokens and all kernels
// whose ts_kernel_info has the same `plan`. Empty for a kernel that needs none.
template <class Memory>
class Plan {
  public:
    // Throws UnsupportedError for weights of more places for blocks than the builder has room for.
    Plan(const Pattern& pattern, std::int32_t kernel, Op op, Memory memory = Memory())
        : kernel_(kernel), plan_(build(pattern.c(), kernel, op, std::move(memory))) {
        const ts_pattern c = pattern.c();
        check(ts_plan_key(&c, kernel, static_cast<std::int32_t>(op), &key_));
    }

    std::int32_t kernel() const { return kernel_; }
    std::int64_t key() const { return key_; }
    const void* data() const { return plan_.data(); }
    std::size_t bytes() const { return plan_.size(); }

  private:
    static Buffer<std::byte, Memory> build(const ts_pattern& pattern, std::int32_t kernel, Op op,
                                           Memory memory) {
        std::size_t bytes = 0;
        check(ts_plan_size(&pattern, kernel, static_cast<std::int32_t>(op), &bytes));
        Buffer<std::byte> host(bytes);
        if (bytes > 0)
            check(ts_plan_build(&pattern, kernel, static_cast<std::int32_t>(op), host.data(), bytes));
        return Buffer<std::byte, Memory>::copy_of(host, std::move(memory));
    }

    std::int32_t kernel_;
    std::int64_t key_ = 0;
    Buffer<std::byte, Memory> plan_;
};

// --- Products --------------------------------------------------------------------------------------------

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
    // Of a pattern that other code keeps, for example one that changes on the device.
    Product(Op op, const ts_pattern& pattern, std::int64_t tokens, Device device) : pattern_(pattern) {
        check_version();
        desc_.struct_size = sizeof desc_;
        desc_.op = static_cast<std::int32_t>(op);
        desc_.device = static_cast<std::int32_t>(device);
        desc_.tokens = tokens;
    }

    // x [tokens, in_features], y, residual and gate [tokens, out_features]. `ld` is the number of elements
    // from one row (feature-major: column) to the next; 0 stands for no gap.
    Product& x(Array x, Layout layout = Layout::row_major, std::int64_t ld = 0) {
        return set(x_, desc_.x, x, layout, ld);
    }
    Product& y(Array y, Layout layout = Layout::row_major, std::int64_t ld = 0) {
        return set(y_, desc_.y, y, layout, ld);
    }
    // In y's layout and dtype.
    Product& residual(Array residual, std::int64_t ld = 0) {
        return set(residual_, desc_.residual, residual, Layout::row_major, ld);
    }
    // Likewise, in the place of a residual: the activation is then that of the gate.
    Product& gate(Array gate, std::int64_t ld = 0) {
        return set(gate_, desc_.gate, gate, Layout::row_major, ld);
    }
    // [nnz, rows, cols], or [nnz, rows, cols / 2] with metadata.
    Product& values(Array values) {
        forget_packed();
        values_ = given(values);
        desc_.values = values.data();
        return *this;
    }
    // Words [nnz, cols / 32, rows / 16, 8, 2] of values that are TS_STORAGE_2_4.
    Product& metadata(Span<const std::uint32_t> metadata) {
        forget_packed();
        metadata_size_ = metadata.size();
        desc_.metadata = metadata.data();
        desc_.storage = TS_STORAGE_2_4;
        return *this;
    }
    // [nnz] or [nnz, rows], of values of 8 bits.
    Product& scales(Span<const float> scales) {
        forget_packed();
        scales_size_ = scales.size();
        desc_.scales = scales.data();
        desc_.row_scales = scales.size() != static_cast<std::uint64_t>(pattern_.nnz);
        return *this;
    }
    // [out_features], in the dtype of the activations.
    Product& bias(Array bias) {
        bias_ = given(bias);
        desc_.bias = bias.data();
        return *this;
    }
    // Of Op::sdd_tn: [out_features], in the dtype of the activations or, where that has 16 bits, float32.
    // Receives the sums over tokens of y, which are added to what is there if `accumulate` says so.
    Product& bias_gradient(Array gradient, bool accumulate = false) {
        bias_gradient_ = given(gradient);
        desc_.bias_gradient = gradient.data();
        desc_.accumulate_bias = accumulate;
        return *this;
    }
    Product& activation(Activation activation) {
        desc_.activation = static_cast<std::int32_t>(activation);
        return *this;
    }
    Product& precision(Precision precision) {
        desc_.precision = static_cast<std::int32_t>(precision);
        return *this;
    }
    // Of Op::sdd_tn: adds to the values.
    Product& accumulate(bool accumulate) {
        desc_.accumulate = accumulate;
        return *this;
    }
    // What select() may answer.
    Product& policy(Policy policy) {
        desc_.policy = static_cast<std::int32_t>(policy);
        return *this;
    }
    // The beginning of the names of kernels that are to compute it if they can; empty: what TILESPARSE_KERNEL
    // says. Fewer than 64 characters, none of them zero.
    Product& prefer(std::string_view names) {
        detail::require(names.size() < sizeof desc_.prefer, "prefer has " + std::to_string(names.size()) +
                                                                " characters; allowed are fewer than " +
                                                                std::to_string(sizeof desc_.prefer));
        detail::require(names.find('\0') == names.npos, "prefer has a zero in it; no kernel's name has");
        std::memset(desc_.prefer, 0, sizeof desc_.prefer);
        names.copy(desc_.prefer, names.size());
        return *this;
    }
    // The index in kernels() of the one to use; without it the library chooses in each call.
    Product& kernel(std::int32_t kernel) {
        detail::require(kernel >= 0 && kernel < ts_kernel_count(), "kernel is " + detail::text(kernel) +
                                                                       "; allowed are 0 to " +
                                                                       detail::text(ts_kernel_count() - 1));
        if (desc_.kernel != kernel + 1) forget_packed();
        desc_.kernel = kernel + 1;
        return *this;
    }
    // A plan, and the kernel that it was made for.
    template <class Memory>
    Product& plan(const Plan<Memory>& plan) {
        kernel(plan.kernel());
        desc_.plan = plan.data();
        desc_.plan_bytes = plan.bytes();
        desc_.plan_key = plan.key();
        return *this;
    }
    template <class Memory>
    Product& plan(const Plan<Memory>&&) = delete;

    // What would compute this, on a device that need not be there, or on that of the product.
    Choice select(const ts_device_info& device) const {
        const ts_matmul_desc desc = c();
        std::vector<char> reason(1024);
        Choice choice{0, {}};
        check(ts_matmul_select(&desc, &device, &choice.kernel, reason.data(), reason.size()));
        choice.reason = reason.data();
        return choice;
    }
    Choice select() const { return select(device_info(static_cast<Device>(desc_.device))); }

    // Microseconds that a kernel, or TS_EXPAND_AND_RUN_DENSE, is estimated to take for this, where there is
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
        detail::require(desc_.device == TS_CPU, "device is cuda; run(workspace, stream) computes there");
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

    // Values in the order in which the kernel reads them, kept for many products: packed_size() bytes, 0 for
    // kernels that have no use for it. The kernel and plan are set before; pack() again when values change.
    // Setters of values and of another kernel forget them.
    std::size_t packed_size() const {
        const ts_matmul_desc desc = c();
        std::size_t bytes = 0;
        check(ts_values_packed_size(&desc, &bytes));
        return bytes;
    }
    template <class Memory>
    Product& pack(Buffer<std::byte, Memory>& packed, ts_stream_t stream) {
        forget_packed();  // which this call may write
        const ts_matmul_desc desc = c();
        check(ts_values_pack(&desc, packed.data(), packed.size(), stream));
        desc_.packed = packed.data();
        desc_.packed_bytes = packed.size();
        desc_.packed_key = desc.plan_key;
        return *this;
    }

    // Plain values [nnz, rows, cols] in the dtype of the activations, of values in any storage.
    void expand(Array plain, ts_stream_t stream = nullptr) const {
        const ts_matmul_desc desc = c();
        detail::require(!plain.is_const(), "plain is const; it is what is written");
        const auto dtype = static_cast<Dtype>(desc.dtype);
        detail::require(plain.dtype() == dtype, std::string("plain is of dtype ") + name_of(plain.dtype()) +
                                                    "; allowed is that of the activations, " +
                                                    name_of(dtype));
        check(ts_values_expand(&desc, plain.data(), plain.size() * size_of(plain.dtype()), stream));
    }

    // For the functions of tilesparse.h, sizes and dtypes checked; valid while the Product stays where it is.
    // Throws InvalidArgumentError.
    ts_matmul_desc c() const {
        check_given();
        check_dtypes();
        ts_matmul_desc desc = desc_;
        desc.pattern = &pattern_;
        const bool is_forward = desc.op == TS_DDS_NT;
        const auto code = [](const Operand& operand) { return static_cast<std::int32_t>(operand.dtype); };
        desc.dtype = code(desc.op == TS_DDS_NN ? y_ : x_);
        desc.values_dtype = code(values_) + 1;
        desc.result_dtype = code(is_forward ? y_ : desc.op == TS_DDS_NN ? x_ : values_) + 1;
        if (residual_.is_given) desc.residual.layout = desc.y.layout;
        if (gate_.is_given) desc.gate.layout = desc.y.layout;
        if (bias_gradient_.is_given) desc.bias_gradient_dtype = code(bias_gradient_) + 1;
        finish_matrix("x", x_, desc.x, pattern_.in_features);
        finish_matrix("y", y_, desc.y, pattern_.out_features);
        finish_matrix("residual", residual_, desc.residual, pattern_.out_features);
        finish_matrix("gate", gate_, desc.gate, pattern_.out_features);
        check_sizes();
        return desc;
    }

  private:
    struct Operand {
        bool is_given = false, is_const = false;
        Dtype dtype = Dtype::float64;
        std::size_t size = 0;
    };

    static Operand given(const Array& array) { return {true, array.is_const(), array.dtype(), array.size()}; }

    Product& set(Operand& operand, ts_matrix& matrix, const Array& array, Layout layout, std::int64_t ld) {
        operand = given(array);
        matrix = {array.data(), ld, static_cast<std::int32_t>(layout), 0};
        return *this;
    }

    void forget_packed() {
        desc_.packed = nullptr;
        desc_.packed_bytes = 0;
        desc_.packed_key = 0;
    }

    void check_given() const {
        const Operand* const operands[] = {&x_, &y_, &values_};
        const char* const names[] = {"x", "y", "values"};
        const int result = desc_.op == TS_DDS_NT ? 1 : desc_.op == TS_DDS_NN ? 0 : 2;
        for (int i = 0; i < 3; ++i) {
            detail::require(operands[i]->is_given, std::string(names[i]) + " is not set");
            detail::require(i != result || !operands[i]->is_const,
                            std::string(names[i]) + " is const; it is what this product writes");
        }
        detail::require(!bias_gradient_.is_const, "bias_gradient is const; it is what this product writes");
    }

    void check_dtypes() const {
        const auto check_same = [](const char* name, const Operand& operand, const char* other,
                                   const Operand& as) {
            detail::require(!operand.is_given || operand.dtype == as.dtype,
                            std::string(name) + " is of dtype " + name_of(operand.dtype) +
                                "; allowed is that of " + other + ", " + name_of(as.dtype));
        };
        if (desc_.op == TS_SDD_TN) check_same("y", y_, "x", x_);
        check_same("bias", bias_, "x", x_);
        check_same("residual", residual_, "y", y_);
        check_same("gate", gate_, "y", y_);
    }

    // Sets the ld of a matrix without gaps, and checks that its memory does not end before its last element.
    void finish_matrix(const char* name, const Operand& operand, ts_matrix& matrix,
                       std::int64_t features) const {
        if (!operand.is_given) return;
        const bool is_row_major = matrix.layout == TS_ROW_MAJOR;
        const std::int64_t lines = is_row_major ? desc_.tokens : features;
        const std::int64_t length = is_row_major ? features : desc_.tokens;
        if (matrix.ld == 0) matrix.ld = length;
        if (lines <= 0 || length <= 0 || matrix.ld < length) return;  // of which ts_matmul says what is wrong
        const auto size = static_cast<std::int64_t>(operand.size);
        const bool fits = length <= size && (lines == 1 || matrix.ld <= (size - length) / (lines - 1));
        detail::require(fits, std::string(name) + " has " + std::to_string(operand.size) + " elements; " +
                                  detail::text(lines) + (is_row_major ? " rows" : " columns") + " of " +
                                  detail::text(length) + ", each " + detail::text(matrix.ld) +
                                  " after the one before, take more");
    }

    static void check_count(const char* name, std::size_t size, std::int64_t expected) {
        detail::require(size == static_cast<std::uint64_t>(expected),
                        std::string(name) + " has " + std::to_string(size) + " elements; allowed are " +
                            detail::text(expected));
    }

    void check_sizes() const {
        const auto is_block = [](std::int32_t extent) { return extent > 0 && extent <= 128; };
        if (!is_block(pattern_.block_rows) || !is_block(pattern_.block_cols) || pattern_.nnz < 0 ||
            pattern_.nnz > INT32_MAX)
            return;  // of which ts_matmul says what is wrong
        const std::int64_t rows = pattern_.nnz * pattern_.block_rows;
        const bool is_2_4 = desc_.storage == TS_STORAGE_2_4;
        check_count("values", values_.size, rows * pattern_.block_cols / (is_2_4 ? 2 : 1));
        if (is_2_4) check_count("metadata", metadata_size_, rows * (pattern_.block_cols / 32));
        if (desc_.scales != nullptr)
            check_count("scales", scales_size_, desc_.row_scales ? rows : pattern_.nnz);
        if (bias_.is_given) check_count("bias", bias_.size, pattern_.out_features);
        if (bias_gradient_.is_given) check_count("bias_gradient", bias_gradient_.size, pattern_.out_features);
    }

    ts_pattern pattern_;
    ts_matmul_desc desc_{};  // without its pattern and dtypes
    Operand x_, y_, residual_, gate_, values_, bias_, bias_gradient_;
    std::size_t metadata_size_ = 0, scales_size_ = 0;
    Buffer<std::byte> workspace_;
};

// TS_STORAGE_2_4 of plain values [nnz, rows, cols], on the CPU: of each 4 neighbours in a row of a block,
// those whose byte in `mask` is not 0, the first two if there are more. `compressed` has half as many
// elements and `metadata` a word for each 32. Throws InvalidArgumentError. ts_values_compress does it on a
// stream, too.
inline void compress(const Pattern& pattern, Array values, Span<const std::uint8_t> mask, Array compressed,
                     Span<std::uint32_t> metadata) {
    const auto check_size = [](const char* name, std::size_t size, std::size_t expected) {
        detail::require(size == expected, std::string(name) + " has " + std::to_string(size) +
                                              " elements; allowed are " + std::to_string(expected));
    };
    check_size("values", values.size(), pattern.values_size());
    check_size("mask", mask.size(), pattern.values_size());
    check_size("compressed", compressed.size(), pattern.values_size() / 2);
    check_size("metadata", metadata.size(), pattern.values_size() / 32);
    detail::require(!compressed.is_const(), "compressed is const; it is what is written");
    detail::require(compressed.dtype() == values.dtype(), "compressed and values are of different dtypes");
    const ts_pattern c = pattern.c();
    check(ts_values_compress(&c, TS_CPU, static_cast<std::int32_t>(values.dtype()), values.data(),
                             mask.data(), 0, compressed.data(), metadata.data(), nullptr));
}

}  // namespace v0_1
}  // namespace tilesparse

#endif  // TILESPARSE_TILESPARSE_HPP_
