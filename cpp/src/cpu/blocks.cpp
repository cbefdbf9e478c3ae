// Products of blocks with sides of any length, which need not divide the shape. Parts of blocks that lie
// outside of the matrix are never read; the gradient of W has zeros there.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/blocks.h"
#include "cpu/memory.h"
#include "cpu/products.h"
#include "threads.h"

namespace ts::cpu {
namespace {

constexpr int64_t kColumns = 64;             // tokens that a task computes
constexpr int64_t kPanelBytes = 64 << 20;    // of packed activations
constexpr int64_t kDecodedBytes = 64 << 10;  // of values of 16 bits that are copied at a time
constexpr int64_t kTaskEntries = 1 << 12;    // about as many blocks are a task
constexpr int64_t kLine = 64;

// The ends of an axis of blocks, of which the last one may be ragged.
struct Axis {
    int64_t block, size;
    int64_t count() const { return ceil_div(size, block); }
    // The last block if it is ragged, else -1, and its extent.
    int64_t last() const { return size % block ? size / block : -1; }
    int64_t last_extent() const { return size % block; }
    int64_t extent(int64_t i) const { return std::min(block, size - i * block); }
};

bool is_simple(const Problem& p) {
    return p.bias == nullptr && p.activation == Activation::none && p.residual.data == nullptr;
}

// Rows of equal number, up to kBlockRows, that `rows` are summed by.
int64_t even_rows(int64_t rows) { return ceil_div(rows, ceil_div(rows, kBlockRows)); }

class BlocksDds {
  public:
    BlocksDds(const Steps& steps, const Steps& sums, Finish finish, const Problem& problem,
              const Device& device, void* memory)
        : steps_(steps),
          sums_(sums),
          blocks_(*sums.blocks),
          finish_(finish),
          p_(problem),
          forward_(p_.forward()),
          input_(p_.input()),
          output_(p_.output()),
          adjacency_(p_.block_rows()),
          rows_{p_.row_block(), p_.features()},
          depths_{p_.k_block(), p_.k_size()},
          entry_(int64_t{p_.pattern.block_rows} * p_.pattern.block_cols),
          element_(element_size(p_.accumulator_dtype())),
          decodes_(element_size(p_.input_dtype) == 2),
          is_vector_(p_.tokens == 1 && stride_of_features(output_) == 1 &&
                     (p_.residual.data == nullptr || stride_of_features(p_.residual) == 1)),
          reads_(!decodes_ &&
                 (is_vector_ ? stride_of_features(input_) == 1 : input_.layout == Layout::column_major)),
          threads_(std::min(max_threads(), device.multiprocessors)),
          workspace_(memory) {
        const int64_t line = std::max<int64_t>(depths_.size, 1) * element_, lanes = blocks_.lanes;
        whole_ = reads_ && !is_vector_ ? p_.tokens / lanes * lanes : 0;
        const int64_t rest = p_.tokens - whole_;
        wave_ = is_vector_
                    ? 1
                    : std::min(round_up(rest, lanes),
                               std::clamp<int64_t>(kPanelBytes / line / lanes * lanes, lanes, kColumns));
        const bool packs = !(is_vector_ && reads_) && rest > 0;
        panel_ = workspace_.take(packs ? wave_ * line + kLine : 0);
        decoded_entries_ = std::max<int64_t>(1, kDecodedBytes / (entry_ * element_));
        decoded_bytes_ = decodes_ ? round_up(decoded_entries_ * entry_ * element_ + kLine, kLine) : 0;
        decoded_ = workspace_.take(device.multiprocessors * decoded_bytes_);
        const int64_t blocks = std::max<int64_t>(p_.pattern.nnz, 1);
        unit_rows_ = std::clamp<int64_t>(
            rows_.count() * kTaskEntries / blocks, 1,
            std::max<int64_t>(1, rows_.count() / (kThreadTasks * device.multiprocessors)));
        if (rows_.block < kTaskFeatures) unit_rows_ = round_up(unit_rows_, kTaskFeatures / rows_.block);
    }

    size_t workspace_size() const { return workspace_.size(); }

    void run() const {
        if (output_.ld == (output_.layout == Layout::row_major ? rows_.size : p_.tokens))
            advise_huge_pages(output_.data, p_.tokens * rows_.size * element_size(p_.result_dtype));
        in_parallel(threads_, [this](Member& member) {
            if (whole_ > 0) run_wave(member, 0, whole_, input_.data, input_.ld);
            for (int64_t token = whole_; token < p_.tokens; token += wave_) {
                const int64_t tokens = std::min(wave_, p_.tokens - token);
                if (is_vector_ && reads_) {
                    run_wave(member, token, tokens, input_.data, 1);
                    continue;
                }
                const int64_t width = is_vector_ ? 1 : round_up(tokens, blocks_.lanes);
                member.share(ceil_div(depths_.size, kPackedFeatures), [&](int64_t i) {
                    const int64_t feature = i * kPackedFeatures;
                    pack_rectangle(
                        steps_, p_.input_dtype, input_,
                        {feature, std::min(kPackedFeatures, depths_.size - feature), token, tokens, width},
                        is_vector_, false, offset(panel_, feature * width * element_), width);
                });
                member.wait();
                run_wave(member, token, tokens, panel_, width);
            }
        });
    }

  private:
    static int64_t stride_of_features(const Matrix& matrix) {
        return matrix.layout == Layout::row_major ? 1 : matrix.ld;
    }

    // Computes tokens from `token` on, the columns of b.
    void run_wave(Member& member, int64_t token, int64_t tokens, const void* b, int64_t ldb) const {
        member.draw(ceil_div(rows_.count(), unit_rows_), ceil_div(tokens, kColumns),
                    [&](int64_t unit, int64_t chunk) {
                        const int64_t first = chunk * kColumns, columns = std::min(kColumns, tokens - first);
                        const int64_t end = std::min((unit + 1) * unit_rows_, rows_.count());
                        const int64_t together = std::max<int64_t>(1, kTaskFeatures / rows_.block);
                        for (int64_t row = unit * unit_rows_; row < end; row += together)
                            compute(row, std::min(row + together, end), token + first, columns,
                                    offset(b, first * element_), ldb, member.thread());
                    });
    }

    // Computes block rows [row, end): of up to kTaskFeatures features, or a single one.
    void compute(int64_t row, int64_t end, int64_t token, int64_t columns, const void* b, int64_t ldb,
                 int thread) const {
        // Sums of features x tokens, and transposed.
        alignas(64) std::byte sums[kTaskFeatures * kColumns * sizeof(double)];
        const int64_t limit = std::min(end * rows_.block, rows_.size);
        for (int64_t feature = row * rows_.block; feature < limit; feature += kTaskFeatures) {
            const int64_t features = std::min<int64_t>(kTaskFeatures, limit - feature);
            const bool in_place = is_simple(p_) && p_.result_dtype == p_.accumulator_dtype() &&
                                  (is_vector_ || output_.layout == Layout::column_major);
            void* const to =
                in_place ? offset(output_.data,
                                  is_vector_ ? feature * element_ : (feature * output_.ld + token) * element_)
                         : sums;
            const int64_t ld = in_place ? output_.ld : kColumns;
            const int64_t step = (is_vector_ ? 1 : ld) * element_;
            int64_t done = 0;
            if (suits_rows(columns)) {
                const int64_t count = features / rows_.block;
                multiply(row, count, 0, rows_.block, columns, b, ldb, to, ld, thread);
                done = count * rows_.block;
            }
            while (done < features) {
                const int64_t block = (feature + done) / rows_.block, within = (feature + done) % rows_.block;
                const int64_t rows = std::min(rows_.block - within, features - done);
                multiply(block, 1, within, rows, columns, b, ldb, offset(to, done * step), ld, thread);
                done += rows;
            }
            if (!in_place) write(feature, features, token, columns, sums);
        }
    }

    // True if a step may go through several block rows, whose values it reads once.
    bool suits_rows(int64_t columns) const {
        if (decodes_ || rows_.block > kBlockRows) return false;
        int log = 3;
        while (blocks_.multiply[0][rows_.block - 1][log] == nullptr) --log;
        return is_vector_ || columns <= int64_t{blocks_.lanes} << log;
    }

    // Sums rows [within, within + rows) of a block row, or all rows of `count` block rows.
    void multiply(int64_t block, int64_t count, int64_t within, int64_t rows, int64_t columns, const void* b,
                  int64_t ldb, void* to, int64_t ld, int thread) const {
        if (count == 0) return;
        const int64_t first = adjacency_.ptr[block], entries = adjacency_.ptr[block + count] - first;
        BlockTile tile{};
        tile.a = p_.values.data;
        tile.slot = adjacency_.slot + first;
        tile.entry = entry_;
        tile.block_cols = p_.pattern.block_cols;
        tile.b = b;
        tile.ldb = ldb;
        tile.idx = adjacency_.idx + first;
        tile.entries = entries;
        tile.count = count;
        if (count > 1) tile.ptr = adjacency_.ptr + block;
        tile.depth = depths_.block;
        tile.last = depths_.last();
        tile.last_depth = depths_.last_extent();
        tile.columns = columns;
        tile.sums = to;
        tile.sums_ld = ld;
        const int64_t beyond = ceil_div(blocks_.lanes, entry_);  // blocks that a vector may reach into
        tile.safe_slots = p_.pattern.nnz - beyond;
        if (!decodes_) return multiply_rows(tile, within, rows);
        std::byte* const decoded = offset(decoded_, thread * decoded_bytes_);
        for (int64_t e = 0; e == 0 || e < entries; e += decoded_entries_) {
            const int64_t count = std::min(decoded_entries_, entries - e);
            for (int64_t i = 0; i < count; ++i)
                steps_.decode_values({offset(p_.values.data, adjacency_.slot[first + e + i] * entry_ * 2),
                                      entry_, offset(decoded, i * entry_ * element_)});
            tile.a = decoded;
            tile.slot = nullptr;
            tile.idx = adjacency_.idx + first + e;
            tile.entries = count;
            tile.adds = e > 0;
            tile.safe_slots = decoded_entries_;  // a line of memory follows
            multiply_rows(tile, within, rows);
        }
    }

    void multiply_rows(BlockTile tile, int64_t within, int64_t rows) const {
        if (is_vector_ && !forward_) return multiply_columns(tile, within, rows);
        const int64_t each = even_rows(rows), row_step = forward_ ? tile.block_cols : 1;
        const void* const a = tile.a;
        void* const sums = tile.sums;
        for (int64_t row = 0; row < rows; row += each) {
            const int64_t some = std::min(each, rows - row);
            tile.a = offset(a, (within + row) * row_step * element_);
            tile.sums = offset(sums, row * (is_vector_ ? 1 : tile.sums_ld) * element_);
            if (is_vector_)
                multiply_vector(tile, some);
            else
                multiply_tile(tile, some);
        }
    }

    void multiply_tile(BlockTile tile, int64_t rows) const {
        const int side = forward_ ? 0 : 1;
        const auto& steps = tile.depth == rows && blocks_.square[side][rows - 1][0] != nullptr
                                ? blocks_.square[side][rows - 1]
                                : blocks_.multiply[side][rows - 1];
        for (int64_t columns = tile.columns; columns > 0;) {
            int log =
                std::min<int>(3, std::bit_width(static_cast<uint64_t>(ceil_div(columns, blocks_.lanes))) - 1);
            while (steps[log] == nullptr) --log;
            const int64_t width = std::min<int64_t>(columns, int64_t{blocks_.lanes} << log);
            tile.columns = width;
            steps[log](tile);
            tile.b = offset(tile.b, width * element_);
            tile.sums = offset(tile.sums, width * element_);
            columns -= width;
        }
    }

    void multiply_vector(BlockTile& tile, int64_t rows) const {
        // As short as a row of a block.
        int log = 0;
        while (log < 2 && 16 / element_ << log < tile.depth && blocks_.vector[0][log + 1][0] != nullptr)
            ++log;
        const int64_t padded = round_up(tile.depth, 16 / element_ << log), left = depths_.size - padded;
        tile.safe_idx = left < 0 ? 0 : left / tile.depth + 1;
        blocks_.vector[tile.depth < 16 / element_ << log][log][rows - 1](tile);
    }

    void multiply_columns(BlockTile& tile, int64_t within, int64_t rows) const {
        const void* const a = tile.a;
        void* const sums = tile.sums;
        for (int64_t column = 0; column < rows;) {
            const int log = std::min<int>(
                2, std::bit_width(static_cast<uint64_t>(ceil_div(rows - column, blocks_.lanes))) - 1);
            const int64_t width = std::min<int64_t>(rows - column, int64_t{blocks_.lanes} << log);
            tile.a = offset(a, (within + column) * element_);
            tile.sums = offset(sums, column * element_);
            tile.columns = width;
            blocks_.columns[log](tile);
            column += width;
        }
    }

    // Writes sums of features x tokens.
    void write(int64_t feature, int64_t features, int64_t token, int64_t columns, void* sums) const {
        alignas(64) std::byte transposed[kTaskFeatures * kColumns * sizeof(double)];
        const bool by_tokens = output_.layout == Layout::row_major || is_vector_;
        if (by_tokens && !is_vector_) {
            sums_.pack({sums, kColumns, features, columns, features, columns, transposed, kTaskFeatures, true,
                        false});
            sums = transposed;
        }
        const int64_t size = element_size(p_.result_dtype);
        const auto at = [&](const Matrix& matrix) {
            if (matrix.data == nullptr) return static_cast<std::byte*>(nullptr);
            return offset(matrix.data, (matrix.layout == Layout::row_major ? token * matrix.ld + feature
                                                                           : feature * matrix.ld + token) *
                                           size);
        };
        finish_({sums,
                 kTaskFeatures,
                 by_tokens ? columns : features,
                 by_tokens ? features : columns,
                 at(output_),
                 output_.ld,
                 false,
                 p_.bias ? offset(p_.bias, feature * size) : nullptr,
                 by_tokens,
                 p_.activation,
                 at(p_.residual),
                 p_.residual.ld,
                 p_.gated,
                 p_.gate_activation,
                 {}});
    }

    const Steps &steps_, &sums_;
    const BlockSteps& blocks_;
    const Finish finish_;
    const Problem& p_;
    const bool forward_;
    const Matrix input_, output_;
    const Adjacency adjacency_;
    const Axis rows_, depths_;
    const int64_t entry_;    // elements of a block
    const int64_t element_;  // bytes of a sum
    const bool decodes_;     // values of 16 bits
    const bool is_vector_;   // one token, whose results lie side by side
    const bool reads_;       // activations where they lie
    const int threads_;
    int64_t whole_, wave_;  // tokens that are read where they lie, and that are packed at a time
    int64_t decoded_entries_, decoded_bytes_;
    int64_t unit_rows_;  // block rows of a task
    Workspace workspace_;
    std::byte* panel_;
    std::byte* decoded_;  // of each thread
};

class BlocksSdd {
  public:
    BlocksSdd(const Steps& steps, const Steps& sums, Finish finish, const Problem& problem,
              const Device& device, void* memory)
        : steps_(steps),
          blocks_(*sums.blocks),
          finish_(finish),
          p_(problem),
          rows_{p_.pattern.block_rows, p_.pattern.out_features},
          cols_{p_.pattern.block_cols, p_.pattern.in_features},
          element_(element_size(p_.accumulator_dtype())),
          threads_(std::min(max_threads(), device.multiprocessors)),
          workspace_(memory),
          x_(taken(p_.x, cols_.size)),
          y_(taken(p_.y, rows_.size)) {
        const int64_t blocks = std::max<int64_t>(p_.pattern.nnz, 1);
        unit_rows_ = std::clamp<int64_t>(
            rows_.count() * kTaskEntries / 8 / blocks, 1,
            std::max<int64_t>(1, rows_.count() / (kThreadTasks * device.multiprocessors)));
    }

    size_t workspace_size() const { return workspace_.size(); }

    void run() const {
        advise_huge_pages(p_.values.data, p_.values.bytes(p_.pattern));
        in_parallel(threads_, [this](Member& member) {
            pack(member, p_.x, x_, cols_.size);
            pack(member, p_.y, y_, rows_.size);
            member.wait();
            member.draw(ceil_div(rows_.count(), unit_rows_), 1, [&](int64_t unit, int64_t) {
                const int64_t end = std::min((unit + 1) * unit_rows_, rows_.count());
                const Adjacency& rows = p_.pattern.rows;
                for (int64_t row = unit * unit_rows_; row < end; ++row)
                    for (int32_t e = rows.ptr[row]; e < rows.ptr[row + 1]; ++e)
                        compute(row, rows.idx[e], rows.slot[e]);
            });
        });
    }

  private:
    // An operand by tokens, of the dtype of sums.
    struct Panel {
        std::byte* packed;  // null: it is read where it lies
        const void* data;
        int64_t ld;
    };

    Panel taken(const Matrix& from, int64_t features) {
        if (from.layout == Layout::row_major && element_size(p_.input_dtype) == element_)
            return {nullptr, from.data, from.ld};
        std::byte* const packed = workspace_.take(p_.tokens * features * element_);
        return {packed, packed, features};
    }

    void pack(const Member& member, const Matrix& from, const Panel& to, int64_t features) const {
        if (to.data != to.packed) return;
        member.share(ceil_div(features, kPackedFeatures), [&](int64_t i) {
            const int64_t feature = i * kPackedFeatures;
            pack_rectangle(steps_, p_.input_dtype, from,
                           {feature, std::min(kPackedFeatures, features - feature), 0, p_.tokens, p_.tokens},
                           true, false, offset(to.packed, feature * element_), to.ld);
        });
    }

    void compute(int64_t row, int64_t col, int64_t slot) const {
        alignas(64) std::byte sums[kBlockRows * 128 * sizeof(double)];
        const int64_t size = element_size(p_.result_dtype), lanes = blocks_.lanes;
        const int64_t height = rows_.extent(row), width = cols_.extent(col), each = even_rows(height);
        const bool in_place = !p_.accumulate && p_.result_dtype == p_.accumulator_dtype();
        const bool narrow = width <= lanes / 2;
        for (int64_t n = 0; n < height; n += each) {
            const int64_t some = std::min(each, height - n);
            void* const block = offset(p_.values.data, (slot * rows_.block + n) * cols_.block * size);
            const int64_t ld = in_place ? cols_.block : 128;
            for (int64_t k = 0; k < width;) {
                const int log = !narrow && width - k > lanes && blocks_.outer[some - 1][1] != nullptr ? 1 : 0;
                const int64_t most = narrow ? std::max<int64_t>(lanes / 2, 16 / element_) : lanes << log;
                const int64_t first = col * cols_.block + k, columns = std::min(width - k, most);
                const OuterTile tile{offset(y_.data, (row * rows_.block + n) * element_),
                                     y_.ld,
                                     offset(x_.data, first * element_),
                                     x_.ld,
                                     p_.tokens,
                                     columns,
                                     first + most <= cols_.size,
                                     offset(in_place ? block : sums, k * element_),
                                     ld};
                (narrow ? blocks_.narrow_outer[some - 1] : blocks_.outer[some - 1][log])(tile);
                k += columns;
            }
            if (!in_place)
                finish_part({sums,
                             ld,
                             some,
                             width,
                             block,
                             cols_.block,
                             false,
                             nullptr,
                             false,
                             Activation::none,
                             p_.accumulate ? block : nullptr,
                             cols_.block,
                             false,
                             Activation::none,
                             {}});
        }
        if (!p_.accumulate) clear_rest(slot, height, width);
    }

    // Columns of a block in parts that the last step takes.
    void finish_part(const Output& output) const {
        const int64_t size = element_size(p_.result_dtype);
        for (int64_t k = 0; k < output.columns; k += kTaskFeatures) {
            Output part = output;
            part.sums = offset(output.sums, k * element_);
            part.columns = std::min<int64_t>(kTaskFeatures, output.columns - k);
            part.data = offset(output.data, k * size);
            if (part.added != nullptr) part.added = part.data;
            finish_(part);
        }
    }

    // Writes zeros where a block lies outside of the matrix.
    void clear_rest(int64_t slot, int64_t height, int64_t width) const {
        if (height == rows_.block && width == cols_.block) return;
        const int64_t size = element_size(p_.result_dtype);
        for (int64_t n = 0; n < rows_.block; ++n) {
            const int64_t from = n < height ? width : 0;
            std::memset(offset(p_.values.data, ((slot * rows_.block + n) * cols_.block + from) * size), 0,
                        (cols_.block - from) * size);
        }
    }

    const Steps& steps_;
    const BlockSteps& blocks_;
    const Finish finish_;
    const Problem& p_;
    const Axis rows_, cols_;
    const int64_t element_;  // bytes of a sum
    const int threads_;
    int64_t unit_rows_;  // block rows of a task
    Workspace workspace_;
    const Panel x_, y_;
};

}  // namespace

size_t blocks_workspace_size(const Steps& steps, const Steps& sums, const Problem& problem,
                             const Device& device) {
    if (problem.op == Op::sdd_tn)
        return BlocksSdd(steps, sums, nullptr, problem, device, nullptr).workspace_size();
    return BlocksDds(steps, sums, nullptr, problem, device, nullptr).workspace_size();
}

void blocks(const Steps& steps, const Steps& sums, Finish finish, const Problem& problem,
            const Device& device, void* workspace) {
    if (problem.op == Op::sdd_tn)
        BlocksSdd(steps, sums, finish, problem, device, workspace).run();
    else
        BlocksDds(steps, sums, finish, problem, device, workspace).run();
}

}  // namespace ts::cpu
