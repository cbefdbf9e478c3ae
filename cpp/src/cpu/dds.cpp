// y = x W^T and x = y W.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/memory.h"
#include "cpu/products.h"
#include "threads.h"

namespace ts::cpu {
namespace {

constexpr int64_t kLeastChunkTokens = 96;  // for which values are read from memory
constexpr int64_t kPanelTokens = 288;      // most tokens whose panels are visited together
constexpr int64_t kSliceFeatures = 1024;   // whose sums wait for the next slice of the panels

class Dds {
  public:
    Dds(const Steps& steps, Finish finish, const Problem& problem, const Device& device, void* memory)
        : steps_(steps),
          finish_(finish),
          p_(problem),
          forward_(p_.forward()),
          input_(p_.input()),
          output_(p_.output()),
          adjacency_(p_.block_rows()),
          block_(p_.row_block()),
          depth_block_(p_.k_block() / steps_.pair),
          features_(p_.features()),
          input_features_(p_.k_size()),
          depth_(input_features_ / steps_.pair),
          rows_(std::min<int64_t>(block_, kMaxRows)),
          by_tokens_(!forward_ && rows_ == kMaxRows && steps_.multiply_tokens != nullptr &&
                     input_.layout == Layout::row_major && output_.layout == Layout::row_major),
          direct_(!by_tokens_ && steps_.values_direct && (forward_ || steps_.pair == 1)),
          threads_(std::min(max_threads(), device.multiprocessors)),
          value_bytes_(direct_ ? 0 : rows_ * depth_ * steps_.packed_size),
          workspace_(memory) {
        choose_tasks(device.multiprocessors);
        // Never fewer for more tokens: memory for many serves a group of few.
        const int64_t packed_tokens = by_tokens_        ? 0
                                      : own_chunks_ > 0 ? device.multiprocessors * most_chunk()
                                                        : round_up(p_.tokens, steps_.lanes);
        panels_ = workspace_.take(packed_tokens * depth_ * steps_.packed_size);
        values_ = workspace_.take(device.multiprocessors * (kTaskFeatures / rows_) * value_bytes_);
        zeros_ = workspace_.take(steps_.x_offset ? device.multiprocessors * input_features_ : 0);
        sums_ = workspace_.take(slice_ < input_features_ ? device.multiprocessors * sum_bytes() : 0);
    }

    size_t workspace_size() const { return workspace_.size(); }

    void run() const {
        // With gaps between its lines the memory is not the result's alone.
        if (output_.ld == (output_.layout == Layout::row_major ? features_ : p_.tokens))
            advise_huge_pages(output_.data, p_.tokens * features_ * element_size(p_.result_dtype));
        in_parallel(threads_, [this](Member& member) { run(member); });
    }

    void run(Member& member) const {
        if (steps_.x_offset)
            std::fill_n(zeros(member.thread()), input_features_, static_cast<std::byte>(steps_.x_offset));
        if (own_chunks_ > 0) return run_own_chunks(member);
        for (int64_t wave = 0; wave < p_.tokens; wave += wave_)
            run_wave(member, wave, std::min(wave + wave_, p_.tokens));
    }

  private:
    // Packed activations [tokens / tile][depth][tile] from a token on, the last of fewer tokens.
    struct Panels {
        const void* data;
        int64_t first;
    };

    // Every thread packs and computes chunks of tokens by itself: what another core has written comes from
    // afar.
    void run_own_chunks(Member& member) const {
        const int64_t vectors = ceil_div(p_.tokens, steps_.lanes);
        const auto begin_of = [&](int64_t i) {
            return std::min(i * vectors / own_chunks_ * steps_.lanes, p_.tokens);
        };
        member.draw(own_chunks_, 1, [&](int64_t i, int64_t) {
            const int64_t begin = begin_of(i), end = begin_of(i + 1);
            const Panels panels{offset(panels_, member.thread() * chunk_ * depth_ * steps_.packed_size),
                                begin};
            for (int64_t token = begin; token < end && !by_tokens_; token += steps_.tile)
                for (int64_t feature = 0; feature < input_features_; feature += kPackedFeatures)
                    pack_input(panels, feature, token, end);
            for (int64_t first = 0; first < features_; first += kSliceFeatures)
                for (int64_t slice = 0; slice == 0 || slice < input_features_;
                     slice += std::max<int64_t>(slice_, 1))
                    for (int64_t feature = first; feature < std::min(first + kSliceFeatures, features_);
                         feature += kTaskFeatures)
                        compute(panels, feature, std::min(feature + kTaskFeatures, features_), begin, end,
                                member.thread(), slice);
        });
    }

    // Packs and computes tokens [wave, end).
    void run_wave(Member& member, int64_t wave, int64_t end) const {
        const Panels panels{panels_, wave};
        if (!by_tokens_) {
            const int64_t packed = ceil_div(input_features_, kPackedFeatures);
            member.share(ceil_div(end - wave, steps_.tile) * packed, [&](int64_t i) {
                pack_input(panels, i % packed * kPackedFeatures, wave + i / packed * steps_.tile, end);
            });
            member.wait();
        }
        member.draw(ceil_div(features_, task_features_), ceil_div(end - wave, chunk_),
                    [&](int64_t i, int64_t chunk) {
                        const int64_t token = wave + chunk * chunk_, feature = i * task_features_;
                        compute(panels, feature, std::min(feature + task_features_, features_), token,
                                std::min(token + chunk_, end), member.thread());
                    });
    }

    // Panels of a chunk of tokens stay in the cache while the values pass by, unless so few would fit that
    // the values were read too often. If there are tokens enough, every thread has chunks of its own. Else a
    // wave of chunks is packed and then computed in some tasks for each thread.
    void choose_tasks(int64_t threads) {
        const int64_t tasks = kThreadTasks * threads;
        chunk_ = most_chunk();
        task_features_ = kTaskFeatures;
        if (p_.tokens >= threads * kLeastChunkTokens) {
            own_chunks_ = threads * ceil_div(p_.tokens, threads * chunk_);
            chunk_ = ceil_div(ceil_div(p_.tokens, steps_.lanes), own_chunks_) * steps_.lanes;
            const int64_t feature_bytes = most_chunk() * steps_.packed_size;
            // Block rows of a task that have panels of their own come back to more of them than the cache
            // holds. For one block row sums would pass by more often than panels.
            if (direct_ && steps_.pair == 1 && block_ < kTaskFeatures &&
                input_features_ * feature_bytes > cache_bytes())
                slice_ =
                    std::max<int64_t>(cache_bytes() / 2 / feature_bytes / depth_block_, 1) * depth_block_;
            return;
        }
        if (ceil_div(features_, task_features_) * ceil_div(p_.tokens, chunk_) < tasks) {
            task_features_ = rows_;
            chunk_ = steps_.tile;
        }
        wave_ = chunk_ * ceil_div(tasks, ceil_div(features_, task_features_));
    }

    int64_t most_chunk() const {
        const int64_t panel_bytes = std::max<int64_t>(depth_, 1) * steps_.tile * steps_.packed_size;
        return steps_.tile * std::clamp<int64_t>(cache_bytes() / panel_bytes,
                                                 ceil_div(kLeastChunkTokens, steps_.tile),
                                                 kPanelTokens / steps_.tile);
    }

    int64_t tile_tokens(int64_t token, int64_t end) const {
        return std::min<int64_t>(steps_.tile, end - token);
    }

    std::byte* panel(const Panels& panels, int64_t token) const {
        return offset(panels.data, (token - panels.first) * depth_ * steps_.packed_size);
    }

    // Packs kPackedFeatures features of a tile of tokens before `end`.
    void pack_input(const Panels& panels, int64_t feature, int64_t token, int64_t end) const {
        const int64_t tokens = tile_tokens(token, end), width = round_up(tokens, steps_.lanes);
        pack_rectangle(
            steps_, p_.input_dtype, input_,
            {feature, std::min(kPackedFeatures, input_features_ - feature), token, tokens, width}, false,
            false, offset(panel(panels, token), feature / steps_.pair * width * steps_.packed_size), width);
    }

    int64_t sum_bytes() const { return most_chunk() * kSliceFeatures * steps_.packed_size; }

    // Computes features [feature, feature_end) of tokens [token, token_end), tile by tile, in one thread:
    // adds the products of the slice that begins at an input feature.
    void compute(const Panels& panels, int64_t feature, int64_t feature_end, int64_t token, int64_t token_end,
                 int thread, int64_t slice = 0) const {
        alignas(64) std::byte own_sums[kSumBytes];
        const bool is_last = slice + slice_ >= input_features_;
        const int64_t group = feature_end - feature;
        alignas(64) int32_t offsets[kTaskFeatures] = {};
        RowTile row_tiles[kTaskFeatures / kMinRows];
        const int64_t count = (feature_end - feature) / rows_, place = thread * (kTaskFeatures / rows_);
        for (int64_t i = 0; i < count; ++i) {
            row_tiles[i] = row_tile_of(feature + i * rows_, place + i);
            if (slice_ < input_features_) cut(row_tiles[i], slice);
        }
        for (const int64_t first = token; token < token_end; token += steps_.tile) {
            const int64_t tokens = tile_tokens(token, token_end);
            std::byte* sums = own_sums;
            if (slice_ < input_features_)
                sums =
                    sums_ + thread * sum_bytes() +
                    (feature % kSliceFeatures * most_chunk() + (token - first) * group) * steps_.packed_size;
            const Output output = output_of(feature, group, token, tokens, sums, offsets);
            if (is_last) prefetch_output(output, element_size(p_.result_dtype));
            for (int64_t i = 0; i < count; ++i) {
                RowTile& tile = row_tiles[i];
                if (by_tokens_) {
                    const int64_t ld = input_.ld * element_size(p_.input_dtype);
                    steps_.multiply_tokens({offset(input_.data, token * ld), ld, tile.a, tile.idx,
                                            tile.entries, tile.depth, tokens,
                                            reinterpret_cast<float*>(sums) + i * rows_, kTaskFeatures});
                } else {
                    tile.b = panel(panels, token);
                    tile.columns = output.sums_ld;
                    tile.sums = offset(sums, i * rows_ * output.sums_ld * steps_.packed_size);
                    steps_.multiply(tile);
                }
                // The cache holds the values by now.
                if (steps_.x_offset && token == first) sum_offsets(tile, zeros(thread), offsets + i * rows_);
            }
            if (is_last) finish_(output);
        }
    }

    // Leaves the entries of a row tile that lie in a slice.
    void cut(RowTile& tile, int64_t slice) const {
        const auto entry_of = [&](int64_t feature) {
            const int32_t* end = tile.idx + tile.entries;
            return std::lower_bound(tile.idx, end, feature / depth_block_) - tile.idx;
        };
        tile.first = entry_of(slice);
        tile.entries = entry_of(slice + slice_);
    }

    std::byte* zeros(int thread) const { return zeros_ + thread * input_features_; }

    // The offset of x adds the sums of a token of zeros to the sums of a row tile.
    void sum_offsets(const RowTile& t, const void* zeros, int32_t* sums) const {
        steps_.multiply_decode({zeros, 0, t.a, t.slot, t.a_entry * steps_.pair, t.idx, t.entries,
                                t.depth * steps_.pair, rows_, 1, sums, 0, rows_, 0, t.entries});
    }

    // The row tile that begins at a feature, without its tokens. Packed values go to `place`.
    RowTile row_tile_of(int64_t feature, int64_t place) const {
        const int64_t row = feature / block_, first = adjacency_.ptr[row];
        RowTile row_tile{};
        row_tile.entries = adjacency_.ptr[row + 1] - first;
        row_tile.idx = adjacency_.idx + first;
        row_tile.depth = depth_block_;
        row_tile.rows = rows_;
        set_values(row_tile, adjacency_.slot + first, feature % block_, place);
        return row_tile;
    }

    void set_values(RowTile& row_tile, const int32_t* slots, int64_t within, int64_t place) const {
        if (direct_) {
            row_tile.a = block_rows(0, within);
            row_tile.slot = slots;
            row_tile.a_entry = block_ * depth_block_;
            row_tile.a_row = forward_ ? depth_block_ : 1;
            row_tile.a_step = forward_ ? 1 : block_;
        } else {
            row_tile.a = offset(values_, place * value_bytes_);
            row_tile.a_entry = rows_ * depth_block_;
            row_tile.a_row = depth_block_;
            row_tile.a_step = 1;
            pack_values(slots, row_tile.entries, within, row_tile.a);
        }
    }

    // Address of features [within, within + rows) of a block.
    const void* block_rows(int64_t slot, int64_t within) const {
        const int64_t rows = p_.pattern.block_rows, cols = p_.pattern.block_cols;
        return offset(p_.values.data,
                      (slot * rows * cols + within * (forward_ ? cols : 1)) * element_size(p_.input_dtype));
    }

    // Copies those features of blocks to [entries, rows, depth_block], or with the last two exchanged.
    void pack_values(const int32_t* slots, int64_t entries, int64_t within, const void* target) const {
        constexpr int64_t ahead = 4;  // blocks are too small for the processor to see where they lie
        const int64_t depths = depth_block_ * steps_.pair, size = element_size(p_.input_dtype);
        const int64_t rows = forward_ ? rows_ : depths, cols = forward_ ? depths : rows_;
        for (int64_t e = 0; e < entries; ++e) {
            if (e + ahead < entries)
                prefetch_rectangle<prefetch>(block_rows(slots[e + ahead], within), rows,
                                             p_.pattern.block_cols * size, cols * size);
            steps_.pack({block_rows(slots[e], within), p_.pattern.block_cols, rows, cols, rows, cols,
                         offset(target, e * rows_ * depth_block_ * steps_.packed_size),
                         by_tokens_ ? rows_ : depth_block_, !forward_ && !by_tokens_, !forward_});
        }
    }

    Output output_of(int64_t feature, int64_t features, int64_t token, int64_t columns, void* sums,
                     const int32_t* offsets) const {
        const bool row_major = output_.layout == Layout::row_major;
        const auto first = [&](int64_t ld) {
            return row_major ? token * ld + feature : feature * ld + token;
        };
        const int64_t size = element_size(p_.result_dtype);
        const Matrix& residual = p_.residual;
        const void* bias = p_.bias ? offset(p_.bias, feature * size) : nullptr;
        return {sums,
                by_tokens_ ? kTaskFeatures : round_up(columns, steps_.lanes),
                by_tokens_ ? columns : features,
                by_tokens_ ? features : columns,
                offset(output_.data, first(output_.ld) * size),
                output_.ld,
                row_major && !by_tokens_,
                bias,
                false,
                p_.activation,
                residual.data ? offset(residual.data, first(residual.ld) * size) : nullptr,
                residual.ld,
                p_.gated,
                p_.gate_activation,
                rescale_of(p_, token, feature, offsets)};
    }

    const Steps& steps_;
    const Finish finish_;
    const Problem& p_;
    const bool forward_;
    const Matrix input_, output_;
    const Adjacency adjacency_;
    const int64_t block_, depth_block_;  // sides of a block; depths count pairs where there are pairs
    const int64_t features_, input_features_, depth_;
    const int64_t rows_;
    const bool by_tokens_;  // activations are read where they lie, and blocks of W have to be packed anyway
    const bool direct_;     // values are read where they lie
    const int threads_;
    const int64_t value_bytes_;
    int64_t own_chunks_ = 0;                // of tokens, each of one thread
    int64_t chunk_, task_features_, wave_;  // tokens, features and tokens
    // Input features of a chunk that are multiplied before the next ones, so that their panels stay in the
    // cache: all of them where slices do not pay.
    int64_t slice_ = input_features_;
    Workspace workspace_;
    std::byte* panels_;
    std::byte* values_;  // of each thread
    std::byte* zeros_;   // a packed token of each thread
    std::byte* sums_;    // of each thread, of features and tokens that have further slices
};

}  // namespace

size_t dds_workspace_size(const Steps& steps, const Problem& problem, const Device& device) {
    return Dds(steps, steps.finish, problem, device, nullptr).workspace_size();
}

void dds(const Steps& steps, Finish finish, const Problem& problem, const Device& device, void* workspace,
         Member* member) {
    const Dds product(steps, finish, problem, device, workspace);
    member != nullptr ? product.run(*member) : product.run();
}

}  // namespace ts::cpu
