#include "combination.h"

#include <algorithm>
#include <cstddef>

#include "abi.h"
#include "checks.h"
#include "cpu/vectors.h"
#include "descriptors.h"
#include "device.h"
#include "error.h"
#include "operands.h"
#include "threads.h"

namespace ts {

Combination check_combination(int32_t device, int32_t dtype, int64_t tokens, int64_t choices,
                              int64_t features, const ts_matrix* result, const char* result_name) {
    Combination of{};
    of.device = check_device_type(device);
    of.dtype = check_dtype(dtype, kActivationDTypes, "dtype");
    check_extent(tokens, "tokens", of.device);
    check_extent(choices, "choices", of.device);
    check_extent(tokens * choices, "tokens * choices", of.device);
    check_features(features, 16, "features", "16", of.device);
    of.tokens = tokens;
    of.choices = choices;
    of.features = features;
    of.result = check_rows(result, tokens, features, result_name);
    return of;
}

Matrix check_row_matrix(const Combination& of, const ts_matrix* source, const char* name) {
    return check_rows(source, of.count(), of.features, name);
}

namespace {

Operand matrix_of(const Combination& of, const Matrix& matrix, int64_t rows, const char* name) {
    return {name, check_operand(matrix, rows, of.features, of.dtype, name, of.device)};
}

// One element for each row.
Operand array_of(const Combination& of, const void* data, int size, const char* name) {
    check_aligned(data, size, name);
    return area(name, data, of.count() * size);
}

Operand weights_of(const Combination& of) {
    return array_of(of, of.weights, element_size(of.dtype), "weights");
}

Operand rows_of(const Combination& of) {
    require(of.count() == 0 || of.rows != nullptr, "rows must not be null");
    const Operand rows = array_of(of, of.rows, sizeof(int64_t), "rows");
    if (of.device == DeviceType::cuda) return rows;
    for (int64_t i = 0; i < of.count(); ++i)
        require(of.rows[i] >= 0 && of.rows[i] < of.count(), "rows[", i, "] must be 0 to ", of.count() - 1,
                ", got ", of.rows[i]);
    return rows;
}

}  // namespace

void check_sum(const Combination& of) {
    const Operand result = matrix_of(of, of.result, of.tokens, "result");
    for (const Operand& read : {matrix_of(of, of.y, of.count(), "y"), rows_of(of), weights_of(of)})
        check_apart(read, result);
}

void check_gradients(const Combination& of) {
    const Operand none = area("nothing", nullptr, 0);
    const Operand of_y = of.wants_y ? matrix_of(of, of.of_y, of.count(), "y_gradient") : none;
    const Operand of_weights = array_of(of, of.of_weights, element_size(of.dtype), "weights_gradient");
    const Operand y = of.of_weights != nullptr ? matrix_of(of, of.y, of.count(), "y") : none;
    for (const Operand& read :
         {matrix_of(of, of.result, of.tokens, "gradient"), y, rows_of(of), weights_of(of)})
        for (const Operand* const written : {&of_y, &of_weights}) check_apart(read, *written);
    check_apart(of_y, of_weights);
}

namespace {

// The work of one token.
template <DType kDType>
class HostRows {
    using Codec = cpu::Codec<kDType, 16>;
    using V = typename Codec::V;
    using S = typename Codec::S;
    using Sum = cpu::element_t<V>;
    using Stored = typename Codec::Stored;
    static constexpr int kLanes = cpu::lanes_of<V>;
    static constexpr int kFeatures = 16;  // at a time
    using Sums = V[kFeatures / kLanes];

  public:
    explicit HostRows(const Combination& of) : of_(of) {}

    void add_up(int64_t token) const {
        auto* const to = row(of_.result, token);
        for (int64_t first = 0; first < of_.features; first += kFeatures) {
            Sums sums{};
            for (int64_t choice = 0; choice < of_.choices; ++choice) {
                const int64_t place = token * of_.choices + choice;
                const auto* const from = row(of_.y, of_.rows[place]) + first;
                const Sum weight = weight_at(place);
                for (int i = 0; i < kFeatures; i += kLanes)
                    sums[i / kLanes] += weight * Codec::decode(cpu::load<S>(from + i));
            }
            for (int i = 0; i < kFeatures; i += kLanes)
                cpu::store(to + first + i, Codec::encode(sums[i / kLanes]));
        }
    }

    void differentiate(int64_t token) const {
        const auto* const slopes = row(of_.result, token);
        for (int64_t choice = 0; choice < of_.choices; ++choice) {
            const int64_t place = token * of_.choices + choice, line = of_.rows[place];
            if (of_.wants_y) spread(slopes, weight_at(place), row(of_.of_y, line));
            if (of_.of_weights != nullptr) {
                V product{};
                product[0] = dot(slopes, row(of_.y, line));
                cpu::store(static_cast<Stored*>(of_.of_weights) + place, Codec::encode(product), 1);
            }
        }
    }

  private:
    Stored* row(const Matrix& matrix, int64_t row) const {
        return static_cast<Stored*>(matrix.data) + row * matrix.ld;
    }

    Sum weight_at(int64_t place) const {
        if (of_.weights == nullptr) return 1;
        return Codec::decode(cpu::load<S>(static_cast<const Stored*>(of_.weights) + place, 1))[0];
    }

    void spread(const Stored* from, Sum weight, Stored* to) const {
        if (of_.weights == nullptr) {
            std::copy_n(from, of_.features, to);  // which may be none, from and to nowhere
            return;
        }
        for (int64_t i = 0; i < of_.features; i += kLanes)
            cpu::store(to + i, Codec::encode(weight * Codec::decode(cpu::load<S>(from + i))));
    }

    Sum dot(const Stored* one, const Stored* other) const {
        Sums sums{};
        for (int64_t first = 0; first < of_.features; first += kFeatures)
            for (int i = 0; i < kFeatures; i += kLanes)
                sums[i / kLanes] += Codec::decode(cpu::load<S>(one + first + i)) *
                                    Codec::decode(cpu::load<S>(other + first + i));
        Sum sum = 0;
        for (const V& lanes : sums)
            for (int i = 0; i < kLanes; ++i) sum += lanes[i];
        return sum;
    }

    const Combination of_;
};

// Calls visit(HostRows of that dtype).
template <class Visit>
void with_rows(const Combination& of, const Visit& visit) {
    switch (of.dtype) {
        case DType::float64:
            return visit(HostRows<DType::float64>(of));
        case DType::float32:
            return visit(HostRows<DType::float32>(of));
        case DType::float16:
            return visit(HostRows<DType::float16>(of));
        default:
            return visit(HostRows<DType::bfloat16>(of));
    }
}

}  // namespace

void combine_rows(const Combination& of, void* stream) {
    if (of.device == DeviceType::cpu) {
        if (of.features == 0) return;  // whose tokens may be as many as there are numbers
        return with_rows(
            of, [&](const auto& rows) { for_each(of.tokens, [&](int64_t token) { rows.add_up(token); }); });
    }
#ifdef TILESPARSE_CUDA
    cuda_device(-1);  // or why there is none
    launch_checked("combine", [&] { return combine::add_up(of, stream); });
#else
    static_cast<void>(stream);
    fail_without_cuda();
#endif
}

void differentiate_combination(const Combination& of, void* stream) {
    if (of.device == DeviceType::cpu)
        return with_rows(of, [&](const auto& rows) {
            for_each(of.tokens, [&](int64_t token) { rows.differentiate(token); });
        });
#ifdef TILESPARSE_CUDA
    cuda_device(-1);  // or why there is none
    launch_checked("combine_gradient", [&] { return combine::differentiate(of, stream); });
#else
    static_cast<void>(stream);
    fail_without_cuda();
#endif
}

}  // namespace ts
