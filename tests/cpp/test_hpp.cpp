// The C++ layer: what its products compute, what it refuses, and who owns what.
#include <tilesparse/tilesparse.hpp>
//
#include <tilesparse/tilesparse.hpp>  // may be included twice

#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>
#if __cplusplus >= 202002L
#include <span>
#endif

struct Half {  // as another library has it
    std::uint16_t bits;
};
template <>
struct tilesparse::DtypeOf<Half> : tilesparse::IsDtype<tilesparse::Dtype::float16> {};

namespace {

namespace ts = tilesparse;

int failures = 0;

void expect(bool holds, const std::string& what) {
    if (holds) return;
    ++failures;
    std::printf("%s\n", what.c_str());
}

// The call throws exactly this class, with this status and a text that mentions something.
template <class Expected>
void throws(ts_status_t status, const std::string& mention, const std::function<void()>& call) {
    try {
        call();
        expect(false, "nothing was thrown, expected: " + mention);
    } catch (const ts::Error& error) {
        const bool is_exact = typeid(error) == typeid(Expected) && error.status() == status;
        expect(is_exact && std::string(error.what()).find(mention) != std::string::npos,
               std::string("\"") + error.what() + "\" does not mention: " + mention);
    }
}

// Memory that counts, of a device that is none.
struct Counts {
    int allocated = 0, freed = 0, copied = 0;
};
class CountingMemory {
  public:
    explicit CountingMemory(Counts& counts) : counts_(&counts) {}
    void* allocate(std::size_t bytes) {
        ++counts_->allocated;
        return ts::HostMemory::allocate(bytes);
    }
    void deallocate(void* memory) noexcept {
        ++counts_->freed;
        ts::HostMemory::deallocate(memory);
    }
    void copy(void* to, const void* from, std::size_t bytes) {
        ++counts_->copied;
        ts::HostMemory::copy(to, from, bytes);
    }

  private:
    Counts* counts_;
};

// --- One small layer: block row 1 is empty, slots are out of order ----------------------------------------

constexpr std::size_t kRows = 16, kCols = 32, kOut = 3 * kRows, kIn = 2 * kCols, kTokens = 5;
const std::vector<std::int32_t> row_ptr{0, 2, 2, 3}, col_idx{0, 1, 1}, row_slot{2, 0, 1};

ts::Pattern layer() { return {{kOut, kIn}, {kRows, kCols}, row_ptr, col_idx, row_slot}; }

// Position in values of W[n, k]; the size of values where the block is not kept.
std::size_t place(std::size_t n, std::size_t k) {
    for (auto e = static_cast<std::size_t>(row_ptr[n / kRows]);
         e < static_cast<std::size_t>(row_ptr[n / kRows + 1]); ++e)
        if (static_cast<std::size_t>(col_idx[e]) == k / kCols)
            return (static_cast<std::size_t>(row_slot[e]) * kRows + n % kRows) * kCols + k % kCols;
    return 3 * kRows * kCols;
}

// Multiples of 1/8 in [-1, 1): all sums below are exact in float32.
template <class T>
std::vector<T> some(std::size_t size) {
    static std::uint32_t state = 1;
    std::vector<T> values(size);
    for (T& value : values) {
        state = state * 1664525u + 1013904223u;
        value = static_cast<T>(static_cast<double>(state >> 28) / 8 - 1);
    }
    return values;
}

template <class T>
double weight(const std::vector<T>& values, std::size_t n, std::size_t k) {
    const std::size_t i = place(n, k);
    return i < values.size() ? static_cast<double>(values[i]) : 0;
}

template <class T>
void test_products() {
    const ts::Pattern pattern = layer();
    const std::size_t x_ld = kTokens + 3;  // column-major, with gaps
    const auto x = some<T>(kIn * x_ld);
    const auto values = some<T>(pattern.values_size());
    const auto bias = some<T>(kOut), residual = some<T>(kTokens * kOut);
    std::vector<T> y(kTokens * kOut), dx(kTokens * kIn), dw(values.size(), T(1)), db(kOut, T(2));

    ts::Product forward(ts::Op::dds_nt, pattern, kTokens);
    forward.x(x, ts::Layout::column_major, x_ld).values(values).bias(bias).residual(residual).y(y).run();
    for (std::size_t t = 0; t < kTokens; ++t)
        for (std::size_t n = 0; n < kOut; ++n) {
            double sum = static_cast<double>(bias[n]) + static_cast<double>(residual[t * kOut + n]);
            for (std::size_t k = 0; k < kIn; ++k)
                sum += static_cast<double>(x[k * x_ld + t]) * weight(values, n, k);
            expect(static_cast<double>(y[t * kOut + n]) == sum, "y is wrong");
        }

    ts::Product gated(ts::Op::dds_nt, pattern, kTokens);
    gated.x(x, ts::Layout::column_major, x_ld).values(values).gate(residual).y(y).run();
    for (std::size_t t = 0; t < kTokens; ++t)
        for (std::size_t n = 0; n < kOut; ++n) {
            double sum = 0;
            for (std::size_t k = 0; k < kIn; ++k)
                sum += static_cast<double>(x[k * x_ld + t]) * weight(values, n, k);
            const double product = sum * static_cast<double>(residual[t * kOut + n]);
            expect(static_cast<double>(y[t * kOut + n]) == product, "y with a gate is wrong");
        }

    ts::Product backward(ts::Op::dds_nn, pattern, kTokens);
    backward.x(dx).values(values).y(residual).run();
    for (std::size_t t = 0; t < kTokens; ++t)
        for (std::size_t k = 0; k < kIn; ++k) {
            double sum = 0;
            for (std::size_t n = 0; n < kOut; ++n)
                sum += static_cast<double>(residual[t * kOut + n]) * weight(values, n, k);
            expect(static_cast<double>(dx[t * kIn + k]) == sum, "the gradient of x is wrong");
        }

    ts::Product gradient(ts::Op::sdd_tn, pattern, kTokens);
    gradient.x(x, ts::Layout::column_major, x_ld).values(dw).y(residual).accumulate(true);
    gradient.bias_gradient(db, true).run();
    for (std::size_t n = 0; n < kOut; ++n) {
        double sum = 2;
        for (std::size_t t = 0; t < kTokens; ++t) sum += static_cast<double>(residual[t * kOut + n]);
        expect(static_cast<double>(db[n]) == sum, "the gradient of the bias is wrong");
    }
    for (std::size_t n = 0; n < kOut; ++n)
        for (std::size_t k = 0; k < kIn; ++k) {
            if (place(n, k) == dw.size()) continue;
            double sum = 1;
            for (std::size_t t = 0; t < kTokens; ++t)
                sum += static_cast<double>(residual[t * kOut + n]) * static_cast<double>(x[k * x_ld + t]);
            expect(weight(dw, n, k) == sum, "the gradient of the values is wrong");
        }
}

// Each block row of the layer as a weight of its own, with tokens of its own.
void test_groups() {
    const ts::Pattern pattern({kOut, kIn}, {kRows, kCols}, row_ptr, col_idx, row_slot, 3);
    const std::vector<std::int32_t> offsets{0, 2, 2, kTokens};
    const auto x = some<float>(kTokens * kIn), values = some<float>(pattern.values_size());
    std::vector<float> y(kTokens * kRows), dx(kTokens * kIn);
    ts::Product forward(ts::Op::dds_nt, pattern, kTokens);
    forward.x(x).values(values).y(y).group_offsets(offsets).run();
    ts::Product backward(ts::Op::dds_nn, pattern, kTokens);
    backward.x(dx).values(values).y(y).group_offsets(offsets).run();
    for (std::size_t t = 0; t < kTokens; ++t) {
        const std::size_t group = t < 2 ? 0 : 2;
        for (std::size_t n = 0; n < kRows; ++n) {
            double sum = 0;
            for (std::size_t k = 0; k < kIn; ++k)
                sum += static_cast<double>(x[t * kIn + k]) * weight(values, group * kRows + n, k);
            expect(static_cast<double>(y[t * kRows + n]) == sum, "y of a group is wrong");
        }
        for (std::size_t k = 0; k < kIn; ++k) {
            double sum = 0;
            for (std::size_t n = 0; n < kRows; ++n)
                sum += static_cast<double>(y[t * kRows + n]) * weight(values, group * kRows + n, k);
            expect(static_cast<double>(dx[t * kIn + k]) == sum, "the gradient of x of a group is wrong");
        }
    }
    throws<ts::InvalidArgumentError>(TS_INVALID_ARGUMENT, "group_offsets must have 4 elements, got 3",
                                     [&] { forward.group_offsets({offsets.data(), offsets.size() - 1}); });
    throws<ts::InvalidArgumentError>(TS_INVALID_ARGUMENT, "pattern.groups, 2", [] {
        ts::Pattern({kOut, kIn}, {kRows, kCols}, row_ptr, col_idx, row_slot, 2);
    });
}

// Rows of 8-bit values have scales, and 2:4 its metadata.
void test_storages() {
    const ts::Pattern pattern = layer();
    const std::size_t size = pattern.values_size();
    std::vector<std::int8_t> values(size), kept(size / 2);
    std::vector<std::uint8_t> mask(size);
    for (std::size_t i = 0; i < size; ++i) {
        values[i] = static_cast<std::int8_t>(static_cast<int>(i * 7 % 15) - 7);
        mask[i] = i % 4 == 1 || i % 4 == 2;
    }
    std::vector<float> scales(3 * kRows), dense(size), x(kTokens * kIn), y(kTokens * kOut);
    for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<float>(i % 5 + 1);
    std::vector<std::uint32_t> metadata(size / 32);
    ts::compress(pattern, values, mask, kept, metadata);
    ts::Product product(ts::Op::dds_nt, pattern, kTokens);
    product.x(x).values(kept).metadata(metadata).scales(scales).y(y);
    product.dequantize(dense);
    for (std::size_t i = 0; i < size; ++i) {
        const float expected = mask[i] != 0 ? static_cast<float>(values[i]) * scales[i / kCols] : 0;
        expect(dense[i] == expected, "dense blocks are wrong");
    }
    product.run();
    throws<ts::InvalidArgumentError>(TS_INVALID_ARGUMENT, "metadata must have 48 elements, got 47", [&] {
        const ts::Span<const std::uint32_t> shorter(metadata.data(), metadata.size() - 1);
        product.metadata(shorter).run();
    });
}

// Two values of 4 bits to a byte.
void test_pairs() {
    const ts::Pattern pattern = layer();
    const std::size_t size = pattern.values_size();
    std::vector<ts::Int4Pair> values(size / 2);
    std::vector<float> scales(3, 0.5F), dense(size), x(kTokens * kIn), y(kTokens * kOut);
    for (std::size_t i = 0; i < values.size(); ++i) values[i].bits = static_cast<std::uint8_t>(i * 37);
    ts::Product product(ts::Op::dds_nt, pattern, kTokens);
    product.x(x).values(values).scales(scales).y(y);
    product.dequantize(dense);
    for (std::size_t i = 0; i < size; ++i) {
        const int bits = i % 2 == 0 ? values[i / 2].bits & 15 : values[i / 2].bits >> 4;
        const float expected = 0.5F * static_cast<float>(bits < 8 ? bits : bits - 16);
        expect(dense[i] == expected, "dense blocks of int4 are wrong");
    }
    product.run();
    throws<ts::InvalidArgumentError>(TS_INVALID_ARGUMENT, "values must have 768 elements, got 1536", [&] {
        const std::vector<ts::Int4Pair> twice(size);
        product.values(twice).run();
    });
}

// A scale for each token and 128 of k, and one for each block, inside of the sums.
void test_scales_inside() {
    const std::size_t side = 128;
    const ts::Pattern pattern =
        ts::Pattern::from_mask({1, 1}, {side, 2 * side}, {static_cast<int>(side), static_cast<int>(side)});
    std::vector<ts::Float8E4M3> x(2 * side), values(2 * side * side);
    for (auto& one : x) one.bits = 0x38;  // 1
    for (auto& one : values) one.bits = 0x38;
    const std::vector<float> of_x{0.5F, 9, 2}, scales{4, 0.25F};  // with a gap
    std::vector<float> y(side);
    ts::Product product(ts::Op::dds_nt, pattern, 1);
    product.x(x).x_scales(of_x, 2).values(values).scales(scales).y(y).run();
    for (const float result : y) expect(result == 128 * (0.5F * 4 + 2 * 0.25F), "scales inside are wrong");
    throws<ts::InvalidArgumentError>(TS_INVALID_ARGUMENT, "x_scales must have at least 4 elements, got 3",
                                     [&] { product.x_scales(of_x, 3).run(); });
}

void test_patterns() {
    const ts::Pattern pattern = ts::Pattern::from_mask({1, 1, 0, 0, 0, 7}, {kOut, kIn}, {kRows, kCols});
    const auto is = [](ts::Span<const std::int32_t> array, const std::vector<std::int32_t>& expected) {
        return std::vector<std::int32_t>(array.begin(), array.end()) == expected;
    };
    expect(is(pattern.row_ptr(), row_ptr) && is(pattern.col_idx(), col_idx), "the mask is another one");
    expect(is(pattern.row_slot(), {0, 1, 2}), "slots are not in order");
    expect(is(pattern.col_ptr(), {0, 1, 3}) && is(pattern.row_idx(), {0, 0, 2}), "the transpose is wrong");
    expect(is(layer().col_slot(), {2, 0, 1}), "the slots of the transpose are wrong");
    expect(pattern.nnz() == 3 && pattern.values_size() == 3 * kRows * kCols, "another size");
    const ts::Pattern copy = pattern;
    expect(copy.c().row_ptr != pattern.c().row_ptr && is(copy.row_ptr(), row_ptr), "a copy shares arrays");

    const std::vector<std::uint8_t> mask(5);
    throws<ts::InvalidArgumentError>(TS_INVALID_ARGUMENT, "mask must have 6 entries for this shape, got 5",
                                     [&] { ts::Pattern::from_mask(mask, {kOut, kIn}, {kRows, kCols}); });
    throws<ts::InvalidArgumentError>(TS_INVALID_ARGUMENT,
                                     "block_shape must have sides of 2 to 128, got (0, 32)",
                                     [] { ts::Pattern::from_mask({1}, {32, 32}, {0, 32}); });
    throws<ts::InvalidArgumentError>(TS_INVALID_ARGUMENT,
                                     "shape must have sides of 0 to 2147483647, got (-16, 32)",
                                     [] { ts::Pattern({-16, 32}, {16, 32}, {0}, {}); });
    throws<ts::InvalidArgumentError>(
        TS_INVALID_ARGUMENT,
        "shape must have sides of 0 to 2147483647, got (9223372036854775807, 0)",  // and takes no memory
        [] { ts::Pattern::from_mask({}, {INT64_MAX, 0}, {16, 32}); });
    throws<ts::InvalidArgumentError>(TS_INVALID_ARGUMENT, "row_ptr must have 4 entries for this shape, got 3",
                                     [] { ts::Pattern({kOut, kIn}, {kRows, kCols}, {0, 1, 1}, {0}); });
    throws<ts::InvalidArgumentError>(TS_INVALID_ARGUMENT, "mask must have 2 entries for this shape, got 1",
                                     [] { ts::Pattern::from_mask({1}, {40, 32}, {32, 32}); });
    throws<ts::InvalidPatternError>(TS_INVALID_PATTERN, "col_idx",
                                    [] { ts::Pattern({kOut, kIn}, {kRows, kCols}, row_ptr, {1, 0, 1}); });
}

void test_refusals() {
    const ts::Pattern pattern = layer();
    std::vector<float> x(kTokens * kIn), y(kTokens * kOut), values(pattern.values_size()), bias(kOut);
    std::vector<double> doubles(kTokens * kOut);
    const std::vector<float> fixed(y);
    const auto refused = [&](const std::string& mention, const std::function<void(ts::Product&)>& change) {
        ts::Product product(ts::Op::dds_nt, pattern, kTokens);
        product.x(x).values(values).bias(bias).y(y);
        throws<ts::InvalidArgumentError>(TS_INVALID_ARGUMENT, mention, [&] {
            change(product);
            product.run();
        });
    };
    refused("y must not be const: this product writes it", [&](ts::Product& p) { p.y(fixed); });
    refused("x must hold 5 rows of 64 elements with ld 64, got 240 elements",
            [&](ts::Product& p) { p.x(y); });
    refused("y must hold 5 rows of 48 elements with ld 49, got 240 elements",
            [&](ts::Product& p) { p.y(y, ts::Layout::row_major, 49); });
    refused("y must hold 48 columns of 5 elements with ld 6, got 240 elements",
            [&](ts::Product& p) { p.y(y, ts::Layout::column_major, 6); });
    refused("y.ld must be at least 48, got 47", [&](ts::Product& p) { p.y(y, ts::Layout::row_major, 47); });
    refused("values must have 1536 elements, got 240", [&](ts::Product& p) { p.values(y); });
    refused("bias must have 48 elements, got 240", [&](ts::Product& p) { p.bias(y); });
    refused("bias must be of the dtype of x, float32, got float64", [&](ts::Product& p) { p.bias(doubles); });
    refused("residual must be of the dtype of y, float32, got float64",
            [&](ts::Product& p) { p.residual(doubles); });
    refused("bias_gradient must not be set unless op is sdd_tn", [&](ts::Product& p) { p.bias_gradient(y); });
    throws<ts::InvalidArgumentError>(
        TS_INVALID_ARGUMENT, "bias_gradient must have 48 elements, got 240",
        [&] { ts::Product(ts::Op::sdd_tn, pattern, kTokens).x(x).y(y).values(values).bias_gradient(y).c(); });
    refused("gate must be of the dtype of y, float32, got float64", [&](ts::Product& p) { p.gate(doubles); });
    refused("scales must have 48 elements, got 47", [&](ts::Product& p) {
        static const std::vector<float> scales(47);
        p.scales(scales);
    });
    refused("kernel must be 1 to ", [](ts::Product& p) { p.kernel(0); });
    refused("got 100000", [](ts::Product& p) { p.kernel(100000); });
    refused("prefer must have fewer than 64 characters, got 64",
            [](ts::Product& p) { p.prefer(std::string(64, 'c')); });
    refused("prefer must not contain a zero", [](ts::Product& p) { p.prefer({"cpu_\0", 5}); });
    refused("prefer must be the beginning of a kernel's name, got sm70_",
            [](ts::Product& p) { p.prefer("sm70_"); });
    refused("pattern.nnz must be 0 to 6, got 9223372036854775807", [&](ts::Product&) {
        ts_pattern endless = pattern.c();
        endless.nnz = INT64_MAX;
        ts::Product(ts::Op::dds_nt, endless, kTokens, ts::Device::cpu).x(x).values(values).y(y).run();
    });
    refused("tokens must be 0 to 2147483647, got -1",
            [&](ts::Product&) { ts::Product(ts::Op::dds_nt, pattern, -1).x(x).values(values).y(y).run(); });
    refused("values must be set",
            [&](ts::Product&) { ts::Product(ts::Op::dds_nt, pattern, kTokens).x(x).y(y).run(); });
    throws<ts::WorkspaceTooSmallError>(TS_WORKSPACE_TOO_SMALL, "", [] { ts::check(TS_WORKSPACE_TOO_SMALL); });
    throws<ts::UnsupportedError>(TS_UNSUPPORTED, "", [] { ts::check(TS_UNSUPPORTED); });
    throws<ts::CudaError>(TS_CUDA_ERROR, "", [] { ts::check(TS_CUDA_ERROR); });
    throws<ts::OutOfMemoryError>(TS_OUT_OF_MEMORY, "", [] { ts::check(TS_OUT_OF_MEMORY); });
    throws<ts::StalePlanError>(TS_STALE_PLAN, "", [] { ts::check(TS_STALE_PLAN); });
    throws<ts::InternalError>(TS_INTERNAL_ERROR, "", [] { ts::check(TS_INTERNAL_ERROR); });
    throws<ts::NoDeviceError>(TS_NO_DEVICE, "", [] { ts::check(TS_NO_DEVICE); });
}

void test_dtypes() {
    const ts::Pattern pattern = layer();
    std::vector<ts::BFloat16> x(kTokens * kIn, ts::BFloat16{0x3f80}), values(pattern.values_size(), x[0]);
    std::vector<ts::BFloat16> y(kTokens * kOut);
    std::vector<float> results(kTokens * kOut);
    ts::Product product(ts::Op::dds_nt, pattern, kTokens);
    product.x(x).values(values).y(y).run();
    expect(y[0].bits == 0x4280 && y[kRows].bits == 0 && y[2 * kRows].bits == 0x4200, "not 64, 0 and 32");
    const ts_matmul_desc c = product.y(results).c();
    expect(c.x.dtype == TS_BFLOAT16 && c.values.dtype == TS_BFLOAT16 && c.y.dtype == TS_FLOAT32,
           "dtypes are others");
    throws<ts::UnsupportedError>(TS_UNSUPPORTED, "it writes float32 instead", [&] { product.run(); });
    ts::Buffer<std::byte> prepacked(product.y(y).prepacked_size());
    expect(prepacked.size() == 0, "kernels of the CPU prepack nothing");
    product.prepack(prepacked, nullptr).prepack(prepacked, nullptr).run();
    ts::Buffer<std::byte> room(64);
    expect(product.prepack(room, nullptr).c().prepacked.data == room.data(), "prepacked values are not read");
    const std::int32_t chosen = product.select().kernel, other = chosen == 1 ? 2 : 1;
    expect(product.kernel(chosen).prepack(room, nullptr).kernel(chosen).c().prepacked.data == room.data(),
           "the same kernel forgets");
    expect(product.kernel(other).c().prepacked.data == nullptr,
           "another kernel reads what was prepacked for the first");
    product.kernel(chosen).prepack(room, nullptr);
    expect(product.values(values).c().prepacked.bytes == 0, "other values are not read");
    expect(product.c().prepacked.key == 0, "a key of no prepacked values");
    const void* const untyped = x.data();
    product.x(ts::Array(untyped, x.size(), ts::Dtype::bfloat16)).y(y).run();
    for (const auto& [dtype, bytes] : {std::pair<ts::Dtype, std::size_t>{ts::Dtype::float64, 8},
                                       {ts::Dtype::float32, 4},
                                       {ts::Dtype::float16, 2},
                                       {ts::Dtype::bfloat16, 2},
                                       {ts::Dtype::int8, 1},
                                       {ts::Dtype::float8_e4m3fn, 1},
                                       {ts::Dtype::int4, 1}})
        expect(ts::size_of(dtype) == bytes, "another size of an element");
}

// A program for a GPU, with memory that the host can read, up to the launch.
void test_devices() {
    Counts counts;
    {
        const CountingMemory memory(counts);
        const ts::Pattern pattern = layer();
        const ts::DevicePattern<CountingMemory> copy(pattern, memory);
        expect(counts.allocated == 6 && counts.copied == 6, "six arrays are not copied once each");
        expect(std::memcmp(copy.c().col_slot, pattern.c().col_slot, 3 * sizeof(std::int32_t)) == 0 &&
                   copy.c().col_slot != pattern.c().col_slot,
               "a copy has other contents");

        const std::vector<ts::BFloat16> numbers(kTokens * kIn);
        auto x = ts::Buffer<ts::BFloat16, CountingMemory>::copy_of(numbers, memory);
        ts::Buffer<ts::BFloat16, CountingMemory> values(pattern.values_size(), memory),
            y(kTokens * kOut, memory);
        auto moved = std::move(x);
        expect(x.data() == nullptr && x.size() == 0 && moved.size() == numbers.size(), "not moved");
        y = ts::Buffer<ts::BFloat16, CountingMemory>(kTokens * kOut, memory);

        ts::Product product(ts::Op::dds_nt, copy, kTokens);
        product.x(moved).values(values).y(y);
        ts_device_info device{sizeof device, TS_CUDA, 90, 132, 232448, 0, {}};
        bool has_cuda = false;
        for (const ts_kernel_info& kernel : ts::kernels()) has_cuda = has_cuda || kernel.device == TS_CUDA;
        if (has_cuda) {
            const ts::Choice choice = product.select(device);
            expect(!choice.is_dense() && !choice.reason.empty(), "no kernel, or no reason");
            const std::optional<double> time = product.estimate(choice.kernel, device);
            expect(time && *time > 0 && product.estimate(TS_RUN_DENSE, device), "no estimate");
            throws<ts::UnsupportedError>(TS_UNSUPPORTED, "it is for another kind of device",
                                         [&] { product.estimate(1, device); });
            const ts::Plan<CountingMemory> plan(pattern, choice.kernel, ts::Op::dds_nt, memory);
            expect(plan.kernel() == choice.kernel && (plan.bytes() == 0) == (plan.key() == 0), "not a plan");
            const ts_matmul_desc c = product.plan(plan).c();
            expect(c.kernel == choice.kernel && c.plan.data == plan.data() && c.plan.key == plan.key() &&
                       c.plan.bytes == plan.bytes(),
                   "the plan is not in the product");
        } else {
            throws<ts::UnsupportedError>(TS_UNSUPPORTED, "", [&] { product.select(device); });
        }
        throws<ts::InvalidArgumentError>(TS_INVALID_ARGUMENT, "run(workspace, stream)",
                                         [&] { product.run(); });
    }
    expect(counts.allocated == counts.freed && counts.allocated > 9, "not all memory is freed");

    const ts::Pattern pattern = layer();
    std::vector<float> operand(kTokens * kIn), values(pattern.values_size());
    ts::Product product(ts::Op::dds_nt, pattern, kTokens);
    const ts::Choice preferred = product.x(operand).y(operand).values(values).prefer("cpu_port").select();
    expect(std::string(ts::kernel_info(preferred.kernel).name) == "cpu_portable" &&
               preferred.reason == "the caller prefers it",
           "not what is preferred");
    expect(product.prefer("").select().reason != preferred.reason, "the preference stays");
    expect(!product.estimate(preferred.kernel, ts::device_info(ts::Device::cpu)), "an estimate for the CPU");

    expect(ts::kernels()[0].device == TS_CPU && ts::device_info(ts::Device::cpu).multiprocessors > 0,
           "no CPU");
    static_assert(!std::is_constructible_v<ts::Product, ts::Op, ts::Pattern&&, std::int64_t>);
    static_assert(!std::is_constructible_v<ts::Array, std::vector<float>&&>);
    static_assert(!std::is_constructible_v<ts::Span<const float>, std::vector<float>&&>);
    static_assert(std::is_constructible_v<ts::Array, ts::Span<const float>>);
    static_assert(!std::is_constructible_v<ts::Span<float>, const std::vector<float>&>);
#if __cplusplus >= 202002L
    static_assert(std::is_constructible_v<ts::Array, std::span<float>>);
    static_assert(std::is_constructible_v<ts::Span<const float>, std::span<float>>);
#endif
    std::vector<Half> halves(1);
    expect(ts::Array(halves).dtype() == ts::Dtype::float16 && !ts::Array(halves).is_const(), "not a dtype");
    expect(ts::Array(std::as_const(halves)).is_const(), "const is lost");
    static_assert(!std::is_copy_constructible_v<ts::Buffer<float>>);
    ts::Buffer<double> target;
    std::array<double, 2> two{1, 2}, back{};
    target = ts::Buffer<double>::copy_of(two);
    target.copy_to(back);
    expect(back == two, "not copied back");
    throws<ts::InvalidArgumentError>(TS_INVALID_ARGUMENT, "target must have the size of the buffer, 2, got 1",
                                     [&] { target.copy_to(ts::Span<double>(back.data(), 1)); });
}

}  // namespace

int main() {
    test_products<float>();
    test_products<double>();
    test_groups();
    test_storages();
    test_pairs();
    test_scales_inside();
    test_patterns();
    test_refusals();
    test_dtypes();
    test_devices();
    ts::check_version();
    std::printf("%d failures\n", failures);
    return failures > 0;
}
