// W = y^T x, on the pattern.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "cpu/memory.h"
#include "cpu/products.h"
#include "threads.h"

namespace ts::cpu {
namespace {

constexpr int64_t kSlab = 64;  // most tokens of a slab

class Sdd {
  public:
    // `finish`: the last step for the dtype of the result.
    Sdd(const Steps& steps, void (*finish)(const Output&), const Problem& problem, const Device& device,
        void* memory)
        : steps_(steps),
          finish_(finish),
          p_(problem),
          block_rows_(p_.pattern.block_rows),
          block_cols_(p_.pattern.block_cols),
          rows_(std::min<int64_t>(block_rows_, kMaxRows)),
          tile_(std::min<int64_t>(block_cols_, int64_t{steps_.lanes} * std::bit_floor(static_cast<uint32_t>(
                                                                           steps_.tile / steps_.lanes)))),
          y_tokens_first_(steps_.pair == 1 && tile_ == steps_.lanes),
          slab_(std::clamp<int64_t>(std::bit_ceil<uint64_t>(p_.tokens), 16, kSlab)),
          slabs_(ceil_div(p_.tokens, slab_)),
          feature_bytes_(slabs_ * slab_ / steps_.pair * steps_.packed_size),
          threads_(std::min(max_threads(), device.multiprocessors)),
          workspace_(memory) {
        choose_tasks(kThreadTasks * device.multiprocessors);
        x_panels_ = workspace_.take(x_wave_ * feature_bytes_);
        y_panels_ = workspace_.take(y_wave_ * feature_bytes_);
    }

    size_t workspace_size() const { return workspace_.size(); }

    // Enough for any fewer tokens, whose waves may be longer.
    size_t most_workspace_size() const {
        Workspace most(nullptr);
        most.take(p_.pattern.in_features * feature_bytes_);
        most.take(p_.pattern.out_features * feature_bytes_);
        return most.size();
    }

    void run() const {
        advise_huge_pages(p_.values.data, p_.values.bytes(p_.pattern));
        in_parallel(threads_, [this](Member& member) { run(member); });
    }

    void run(Member& member) const {
        const int64_t outs = p_.pattern.out_features, ins = p_.pattern.in_features;
        for (int64_t y = 0; y < outs; y += y_wave_) {
            const int64_t y_end = std::min(y + y_wave_, outs);
            pack_features(member, p_.y, y, y_end, rows_, y_tokens_first_, y_panels_, y_wave_);
            for (int64_t x = 0; x < ins; x += x_wave_) {
                const int64_t x_end = std::min(x + x_wave_, ins);
                if (y == 0) pack_features(member, p_.x, x, x_end, tile_, true, x_panels_, x_wave_);
                member.wait();
                run_wave(member, y, y_end, x, x_end);
            }
        }
    }

  private:
    // Computes what features [y, y_end) of y and [x, x_end) of x give, which are packed.
    void run_wave(Member& member, int64_t y, int64_t y_end, int64_t x, int64_t x_end) const {
        member.draw((y_end - y) / block_rows_, ceil_div(x_end - x, chunk_), [&](int64_t row, int64_t chunk) {
            const int64_t col = x + chunk * chunk_;
            compute(y / block_rows_ + row, col / block_cols_, std::min(col + chunk_, x_end) / block_cols_);
        });
    }

    // A task is a block row and a chunk of columns whose panels stay in the cache. The operand of
    // more features is packed in waves that stay there too, but give at least `tasks` tasks; the other
    // one is packed whole.
    void choose_tasks(int64_t tasks) {
        const int64_t rows = p_.pattern.out_features / block_rows_,
                      cols = p_.pattern.in_features / block_cols_;
        const int64_t cached_features = feature_bytes_ ? cache_bytes() / feature_bytes_ : cache_bytes();
        int64_t chunk = std::clamp<int64_t>(cached_features / block_cols_, 1, cols);
        if (rows * ceil_div(cols, chunk) < tasks) chunk = 1;
        chunk_ = chunk * block_cols_;
        x_wave_ = p_.pattern.in_features;
        y_wave_ = p_.pattern.out_features;
        if (x_wave_ > y_wave_)
            x_wave_ = std::min(x_wave_, chunk_ * ceil_div(tasks, rows));
        else
            y_wave_ = std::min(y_wave_, block_rows_ * std::max(cached_features / block_rows_,
                                                               ceil_div(tasks, ceil_div(cols, chunk))));
    }

    // Packs features [feature, end) as panels [features / width][slab], each [tokens of a slab, width] or
    // [width, tokens of a slab]; threads share the work and do not wait for each other.
    void pack_features(const Member& member, const Matrix& from, int64_t feature, int64_t end, int64_t width,
                       bool tokens_first, std::byte* panels, int64_t wave) const {
        const int64_t slab_bytes = slab_ / steps_.pair * width * steps_.packed_size;
        member.share(ceil_div(end - feature, width) * slabs_, [&](int64_t i) {
            const int64_t slab = i % slabs_, token = slab * slab_, f = feature + i / slabs_ * width;
            pack_rectangle(steps_, p_.input_dtype, from,
                           {f, width, token, std::min(slab_, p_.tokens - token), slab_}, tokens_first, true,
                           offset(panels, f % wave * feature_bytes_ + slab * slab_bytes),
                           tokens_first ? width : slab_);
        });
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
        alignas(64) std::byte sums[kSumBytes];
        RowTile row_tile{};
        row_tile.entries = slabs_;
        row_tile.depth = slab_ / steps_.pair;
        row_tile.a_entry = rows_ * row_tile.depth;
        row_tile.a_row = y_tokens_first_ ? 1 : row_tile.depth;
        row_tile.a_step = y_tokens_first_ ? rows_ : 1;
        row_tile.rows = rows_;
        row_tile.columns = tile_;
        row_tile.sums = sums;
        for (int64_t n = 0; n < block_rows_; n += rows_)
            for (int64_t k = 0; k < block_cols_; k += tile_) {
                row_tile.a = offset(y_panels_, (row * block_rows_ + n) % y_wave_ * feature_bytes_);
                row_tile.b = offset(x_panels_, (col * block_cols_ + k) % x_wave_ * feature_bytes_);
                const int64_t first = (slot * block_rows_ + n) * block_cols_ + k,
                              size = element_size(p_.result_dtype);
                void* block = offset(p_.values.data, first * size);
                const Output output{sums,
                                    tile_,
                                    rows_,
                                    tile_,
                                    block,
                                    block_cols_,
                                    false,
                                    nullptr,
                                    false,
                                    Activation::none,
                                    p_.accumulate ? block : nullptr,
                                    block_cols_,
                                    false,
                                    Activation::none,
                                    {}};
                prefetch_output(output, size);
                steps_.multiply(row_tile);
                finish_(output);
            }
    }

    const Steps& steps_;
    const Finish finish_;
    const Problem& p_;
    const int64_t block_rows_, block_cols_;
    const int64_t rows_, tile_;
    const bool y_tokens_first_;   // the faster order for tiles of one vector, but not for pairs
    const int64_t slab_, slabs_;  // tokens of a slab; the last one is padded with zeros
    const int64_t feature_bytes_;
    const int threads_;
    int64_t chunk_, x_wave_, y_wave_;  // features
    Workspace workspace_;
    std::byte* x_panels_;
    std::byte* y_panels_;
};

}  // namespace

size_t most_sdd_workspace_size(const Steps& steps, const Problem& problem, const Device& device) {
    return Sdd(steps, steps.finish, problem, device, nullptr).most_workspace_size();
}

size_t sdd_workspace_size(const Steps& steps, const Problem& problem, const Device& device) {
    return Sdd(steps, steps.finish, problem, device, nullptr).workspace_size();
}

void sdd(const Steps& steps, Finish finish, const Problem& problem, const Device& device, void* workspace,
         Member* member) {
    const Sdd product(steps, finish, problem, device, workspace);
    member != nullptr ? product.run(*member) : product.run();
}

}  // namespace ts::cpu
