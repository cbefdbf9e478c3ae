// Every product is a sum over kept blocks of strips of 16 features times panels of columns:
//
//   dds  columns are tokens; the activations are packed into panels once, W is read where it lies
//   sdd  columns are features of x; tokens are cut into slabs, which take the place of the blocks
//
// A unit of parallel work owns what it writes and sums in the order of the pattern, so results do not
// depend on the number of threads.
#include "cpu/cpu.h"

#include <omp.h>

#include <algorithm>
#include <bit>

#include "cpu/steps.h"

namespace ts::cpu {
namespace {

constexpr int64_t kCacheBytes = 1 << 20;  // of panels that should stay in a core's own cache
constexpr int64_t kChunkColumns = 256;    // most columns a strip is summed for at once
constexpr int64_t kPackedFeatures = 512;  // features one unit of packing covers
constexpr int64_t kSlab = 64;             // most tokens of a slab

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

std::byte* offset(const void* base, int64_t bytes) {
    return const_cast<std::byte*>(static_cast<const std::byte*>(base)) + bytes;
}

int thread_count(const Device& device) { return std::min(omp_get_max_threads(), device.multiprocessors); }

// Hands out parts of the workspace; with no memory behind it, it counts.
class Workspace {
  public:
    explicit Workspace(void* base) : base_(base) {}
    std::byte* take(int64_t bytes) {
        std::byte* part = base_ ? offset(base_, size_) : nullptr;
        size_ += round_up(bytes, 256);
        return part;
    }
    size_t size() const { return size_; }

  private:
    void* base_;
    int64_t size_ = 0;
};

// Copies depths [depth0, depth0 + depths) x columns [column0, column0 + columns) of a matrix to
// target[d / pair][c]. Columns are tokens or features, depths are the other.
struct PanelPart {
    bool columns_are_features;
    int64_t depth0, depths, padded_depths;
    int64_t column0, columns, padded_columns;
};

void pack_panel(const Steps& steps, DType dtype, const Matrix& matrix, const PanelPart& part, void* target) {
    const bool along_columns = part.columns_are_features == (matrix.layout == Layout::row_major);
    const int64_t first =
        along_columns ? part.depth0 * matrix.ld + part.column0 : part.column0 * matrix.ld + part.depth0;
    Pack pack{offset(matrix.data, first * element_size(dtype)),
              matrix.ld,
              part.depths,
              part.columns,
              part.padded_depths,
              part.padded_columns,
              target,
              part.padded_columns,
              !along_columns,
              along_columns};
    if (!along_columns) {
        std::swap(pack.rows, pack.cols);
        std::swap(pack.padded_rows, pack.padded_cols);
    }
    steps.pack(pack);
}

// ---- dds ----

class Dds {
  public:
    Dds(const Steps& steps, const Problem& problem, int threads, Workspace& workspace)
        : steps_(steps),
          p_(problem),
          forward_(p_.op == Op::dds_nt),
          input_(forward_ ? p_.x : p_.y),
          output_(forward_ ? p_.y : p_.x),
          adjacency_(forward_ ? p_.pattern.rows : p_.pattern.cols),
          block_(forward_ ? p_.pattern.block_rows : p_.pattern.block_cols),
          depth_block_(forward_ ? p_.pattern.block_cols : p_.pattern.block_rows),
          features_(forward_ ? p_.pattern.out_features : p_.pattern.in_features),
          depth_((forward_ ? p_.pattern.in_features : p_.pattern.out_features)),
          direct_(steps_.values_direct && (forward_ || steps_.pair == 1)),
          value_bytes_(direct_ ? 0 : round_up(kStrip * depth_ / steps_.pair * steps_.packed_size, 64)),
          sum_bytes_(round_up(kStrip * kChunkColumns * steps_.packed_size, 64)) {
        panels_ =
            workspace.take(depth_ / steps_.pair * round_up(p_.tokens, steps_.lanes) * steps_.packed_size);
        scratch_ = workspace.take(threads * (value_bytes_ + sum_bytes_));
    }

    void run(int threads) const {
        const int64_t tiles = ceil_div(p_.tokens, steps_.tile), parts = ceil_div(depth_, kPackedFeatures);
        const int64_t chunk = chunk_columns(threads);
        const int64_t strips = features_ / kStrip, chunks = ceil_div(p_.tokens, chunk);
#pragma omp parallel num_threads(threads)
        {
#pragma omp for collapse(2)
            for (int64_t tile = 0; tile < tiles; ++tile)
                for (int64_t part = 0; part < parts; ++part)
                    pack_input(tile * steps_.tile, part * kPackedFeatures);
#pragma omp for collapse(2) schedule(dynamic)
            for (int64_t c = 0; c < chunks; ++c)
                for (int64_t strip = 0; strip < strips; ++strip)
                    compute(strip * kStrip, c * chunk, std::min(chunk, p_.tokens - c * chunk));
        }
    }

  private:
    // Panels of a chunk stay in the cache while the values pass by, unless threads would be idle.
    int64_t chunk_columns(int threads) const {
        const int64_t panel_bytes = depth_ / steps_.pair * steps_.tile * steps_.packed_size;
        const int64_t most =
            std::max<int64_t>(1, std::min(kCacheBytes / panel_bytes, kChunkColumns / steps_.tile));
        const bool busy = features_ / kStrip * ceil_div(p_.tokens, most * steps_.tile) >= 4 * threads;
        return (busy ? most : 1) * steps_.tile;
    }

    void pack_input(int64_t token, int64_t feature) const {
        const int64_t columns = std::min<int64_t>(steps_.tile, p_.tokens - token);
        const int64_t width = round_up(columns, steps_.lanes);
        const int64_t features = std::min(kPackedFeatures, depth_ - feature);
        const int64_t first = (token * depth_ + feature * width) / steps_.pair;
        pack_panel(steps_, p_.dtype, input_, {false, feature, features, features, token, columns, width},
                   offset(panels_, first * steps_.packed_size));
    }

    void compute(int64_t feature, int64_t token, int64_t columns) const {
        const int64_t row = feature / block_, within = feature % block_;
        const int32_t* slots = adjacency_.slot + adjacency_.ptr[row];
        std::byte* values = scratch_ + omp_get_thread_num() * (value_bytes_ + sum_bytes_);
        std::byte* sums = values + value_bytes_;

        Strip strip{};
        strip.entries = adjacency_.ptr[row + 1] - adjacency_.ptr[row];
        strip.idx = adjacency_.idx + adjacency_.ptr[row];
        strip.depth = depth_block_ / steps_.pair;
        strip.b = offset(panels_, token * (depth_ / steps_.pair) * steps_.packed_size);
        strip.b_depth = depth_ / steps_.pair;
        strip.columns = round_up(columns, steps_.lanes);
        strip.sums = sums;
        if (direct_) {
            strip.slot = slots;
            strip.a = block_strip(0, within);
            strip.a_entry = int64_t{block_} * strip.depth;
            strip.a_row = forward_ ? strip.depth : 1;
            strip.a_step = forward_ ? 1 : block_;
        } else {
            pack_values(slots, strip.entries, within, values);
            strip.a = values;
            strip.a_entry = kStrip * strip.depth;
            strip.a_row = strip.depth;
            strip.a_step = 1;
        }
        steps_.multiply(strip);
        write(feature, token, columns, strip);
    }

    // The part of a block that belongs to the strip that starts at feature `within` of the block.
    const void* block_strip(int64_t slot, int64_t within) const {
        const int64_t first = slot * block_ * depth_block_ + within * (forward_ ? depth_block_ : 1);
        return offset(p_.values, first * element_size(p_.dtype));
    }

    // Copies the strip's part of every block to [kStrip, depth_block].
    void pack_values(const int32_t* slots, int64_t entries, int64_t within, std::byte* target) const {
        const int64_t rows = forward_ ? kStrip : depth_block_, cols = forward_ ? depth_block_ : kStrip;
        Pack pack{nullptr, p_.pattern.block_cols,      rows,      cols,     rows, cols,
                  nullptr, depth_block_ / steps_.pair, !forward_, !forward_};
        for (int64_t e = 0; e < entries; ++e) {
            pack.source = block_strip(slots[e], within);
            pack.target = target + e * kStrip * pack.target_ld * steps_.packed_size;
            steps_.pack(pack);
        }
    }

    void write(int64_t feature, int64_t token, int64_t columns, const Strip& strip) const {
        const int size = element_size(p_.dtype);
        const bool transposed = output_.layout == Layout::row_major;
        const int64_t first = transposed ? token * output_.ld + feature : feature * output_.ld + token;
        const void* bias = p_.bias && forward_ ? offset(p_.bias, feature * size) : nullptr;
        steps_.finish({strip.sums, strip.columns, columns, offset(output_.data, first * size), output_.ld,
                       transposed, bias, forward_ ? p_.activation : Activation::none, false});
    }

    const Steps& steps_;
    const Problem& p_;
    const bool forward_;
    const Matrix input_, output_;
    const Adjacency adjacency_;
    const int32_t block_, depth_block_;
    const int64_t features_, depth_;
    const bool direct_;
    const int64_t value_bytes_, sum_bytes_;
    std::byte* panels_;
    std::byte* scratch_;
};

// ---- sdd ----

class Sdd {
  public:
    Sdd(const Steps& steps, const Problem& problem, int threads, Workspace& workspace)
        : steps_(steps),
          p_(problem),
          slab_(std::clamp<int64_t>(std::bit_ceil(static_cast<uint64_t>(p_.tokens)), 16, kSlab)),
          slabs_(ceil_div(p_.tokens, slab_)),
          slab_depth_(slab_ / steps_.pair),
          depth_(slabs_ * slab_depth_),
          sum_bytes_(kStrip * p_.pattern.block_cols * steps_.packed_size) {
        x_panels_ = workspace.take(depth_ * p_.pattern.in_features * steps_.packed_size);
        y_panels_ = workspace.take(depth_ * p_.pattern.out_features * steps_.packed_size);
        sums_ = workspace.take(threads * sum_bytes_);
    }

    void run(int threads) const {
        const int64_t cols = p_.pattern.in_features / p_.pattern.block_cols;
        const int64_t rows = p_.pattern.out_features / p_.pattern.block_rows;
        const int64_t strips = p_.pattern.out_features / kStrip;
        const int64_t chunk = chunk_columns(threads), chunks = ceil_div(cols, chunk);
#pragma omp parallel num_threads(threads)
        {
#pragma omp for collapse(2) nowait
            for (int64_t slab = 0; slab < slabs_; ++slab)
                for (int64_t col = 0; col < cols; ++col) pack_x(slab, col);
#pragma omp for collapse(2)
            for (int64_t slab = 0; slab < slabs_; ++slab)
                for (int64_t strip = 0; strip < strips; ++strip) pack_y(slab, strip);
#pragma omp for collapse(2) schedule(dynamic)
            for (int64_t c = 0; c < chunks; ++c)
                for (int64_t row = 0; row < rows; ++row) compute(row, c * chunk, (c + 1) * chunk);
        }
    }

  private:
    // Block columns whose panels stay in the cache while block rows pass by, unless threads would be idle.
    int64_t chunk_columns(int threads) const {
        const Pattern& pattern = p_.pattern;
        const int64_t panel_bytes = std::max<int64_t>(1, depth_ * pattern.block_cols * steps_.packed_size);
        const int64_t blocks =
            pattern.in_features / pattern.block_cols * (pattern.out_features / pattern.block_rows);
        return std::max<int64_t>(1, std::min(kCacheBytes / panel_bytes, blocks / (8 * threads)));
    }

    int64_t tokens_of(int64_t slab) const { return std::min(slab_, p_.tokens - slab * slab_); }

    // Panels [features / tile][depth][tile]; the last tile of a block may be narrower.
    void pack_x(int64_t slab, int64_t col) const {
        const int64_t block = p_.pattern.block_cols;
        for (int64_t within = 0; within < block; within += steps_.tile) {
            const int64_t feature = col * block + within,
                          width = std::min<int64_t>(steps_.tile, block - within);
            const int64_t first = feature * depth_ + slab * slab_depth_ * width;
            pack_panel(steps_, p_.dtype, p_.x,
                       {true, slab * slab_, tokens_of(slab), slab_, feature, width, width},
                       offset(x_panels_, first * steps_.packed_size));
        }
    }

    // Panels [features / kStrip][slab][kStrip][depth of a slab].
    void pack_y(int64_t slab, int64_t strip) const {
        const bool row_major = p_.y.layout == Layout::row_major;
        const int64_t token = slab * slab_, feature = strip * kStrip;
        const int64_t source = row_major ? token * p_.y.ld + feature : feature * p_.y.ld + token;
        const int64_t target = feature * depth_ + slab * kStrip * slab_depth_;
        Pack pack{offset(p_.y.data, source * element_size(p_.dtype)),
                  p_.y.ld,
                  kStrip,
                  tokens_of(slab),
                  kStrip,
                  slab_,
                  offset(y_panels_, target * steps_.packed_size),
                  slab_depth_,
                  row_major,
                  row_major};
        if (row_major) {
            std::swap(pack.rows, pack.cols);
            std::swap(pack.padded_rows, pack.padded_cols);
        }
        steps_.pack(pack);
    }

    // Computes the kept blocks of a block row in block columns [first, last).
    void compute(int64_t row, int64_t first, int64_t last) const {
        const Adjacency& rows = p_.pattern.rows;
        const int32_t* end = rows.idx + rows.ptr[row + 1];
        for (const int32_t* i = std::lower_bound(rows.idx + rows.ptr[row], end, first); i < end && *i < last;
             ++i)
            compute_block(row, *i, rows.slot[i - rows.idx]);
    }

    void compute_block(int64_t row, int64_t col, int64_t slot) const {
        const int64_t block_rows = p_.pattern.block_rows, block_cols = p_.pattern.block_cols;
        Strip strip{};
        strip.a_entry = kStrip * slab_depth_;
        strip.a_row = slab_depth_;
        strip.a_step = 1;
        strip.b = offset(x_panels_, col * block_cols * depth_ * steps_.packed_size);
        strip.b_depth = depth_;
        strip.entries = slabs_;
        strip.depth = slab_depth_;
        strip.columns = block_cols;
        strip.sums = sums_ + omp_get_thread_num() * sum_bytes_;
        for (int64_t within = 0; within < block_rows; within += kStrip) {
            strip.a = offset(y_panels_, (row * block_rows + within) * depth_ * steps_.packed_size);
            steps_.multiply(strip);
            const int64_t first = (slot * block_rows + within) * block_cols;
            steps_.finish({strip.sums, block_cols, block_cols,
                           offset(p_.values, first * element_size(p_.dtype)), block_cols, false, nullptr,
                           Activation::none, p_.accumulate});
        }
    }

    const Steps& steps_;
    const Problem& p_;
    const int64_t slab_, slabs_, slab_depth_, depth_;
    const int64_t sum_bytes_;
    std::byte* x_panels_;
    std::byte* y_panels_;
    std::byte* sums_;
};

// ---- registry ----

template <const InstructionSet& set>
const char* refuses(const Problem&, const Device&) {
    return set.available() ? nullptr : set.missing;
}

template <const InstructionSet& set>
size_t workspace_size(const Problem& problem, const Device& device) {
    const Steps& steps = set.steps[static_cast<int>(problem.dtype)];
    Workspace workspace(nullptr);
    if (problem.op == Op::sdd_tn)
        Sdd(steps, problem, device.multiprocessors, workspace);
    else
        Dds(steps, problem, device.multiprocessors, workspace);
    return workspace.size();
}

template <const InstructionSet& set>
int32_t launch(const Problem& problem, const Device& device, void* memory, void*) {
    const Steps& steps = set.steps[static_cast<int>(problem.dtype)];
    Workspace workspace(memory);
    if (problem.op == Op::sdd_tn)
        Sdd(steps, problem, device.multiprocessors, workspace).run(thread_count(device));
    else
        Dds(steps, problem, device.multiprocessors, workspace).run(thread_count(device));
    return 0;
}

template <const InstructionSet& set>
constexpr Kernel row(const char* name, uint32_t dtypes) {
    return {
        name,         DeviceType::cpu,     0,          0b111, dtypes, Precision::highest, {0, 0}, 0, kStrip,
        refuses<set>, workspace_size<set>, launch<set>};
}

constexpr Kernel kKernels[] = {
    row<portable>("cpu_portable", 0b1111),
};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

// Fixed for the process, unlike the number of threads, so that a size of a workspace stays valid.
int32_t processors() { return omp_get_num_procs(); }

}  // namespace ts::cpu
