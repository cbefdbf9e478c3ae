// Every product is a sum over kept blocks of strips of 16 features times panels of columns:
//
//   dds  columns are tokens; the activations are packed into panels once, W is read where it lies;
//        for few tokens, with which panels would be nearly empty, vectors lie along k
//   sdd  columns are features of x; tokens are cut into slabs, which take the place of the blocks
//
// A task, what one thread does by itself, owns what it writes and sums in the order of the pattern, so
// results do not depend on the number of threads.
#include "cpu/cpu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "cpu/steps.h"
#include "threads.h"

namespace ts::cpu {
namespace {

constexpr int64_t kLeastChunkTokens = 96;              // for which values are read from memory
constexpr int64_t kChunkTokens = 256;                  // most tokens whose panels are visited together
constexpr int64_t kPackedFeatures = 512;               // features that a task packs
constexpr int64_t kSlab = 64;                          // most tokens of a slab
constexpr int64_t kThreadTasks = 4;                    // that a thread has at least, if there are so many
constexpr int64_t kSumBytes = kTaskFeatures * 64 * 4;  // of a task times the widest tile

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

std::byte* offset(const void* base, int64_t bytes) {
    return const_cast<std::byte*>(static_cast<const std::byte*>(base)) + bytes;
}

void prefetch(const void* address) { __builtin_prefetch(address); }

// In assembly: the compiler's own hint asks only to read where its baseline lacks this instruction,
// which older processors ignore.
void prefetch_to_write(const void* address) {
#ifdef __x86_64__
    asm volatile("prefetchw (%0)" ::"r"(address));
#else
    __builtin_prefetch(address, 1);
#endif
}

// Fetches the lines of a rectangle of `rows` times `bytes`.
template <void (*fetch)(const void*)>
void prefetch_rectangle(const void* data, int64_t rows, int64_t row_stride, int64_t bytes) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t byte = 0; byte < bytes; byte += 64) fetch(offset(data, row * row_stride + byte));
}

// Fetches what `finish` will read and change, which would otherwise hold up the sums that come next.
void prefetch_output(const Output& output, int element_bytes) {
    const int64_t lines = output.transposed ? output.columns : output.rows;
    const int64_t bytes = (output.transposed ? output.rows : output.columns) * element_bytes;
    prefetch_rectangle<prefetch_to_write>(output.data, lines, output.ld * element_bytes, bytes);
    if (output.added != nullptr && output.added != output.data)
        prefetch_rectangle<prefetch>(output.added, lines, output.added_ld * element_bytes, bytes);
}

// Bytes of panels that should stay in a core's own cache beside what passes through it.
int64_t cache_bytes() {
#ifdef __GLIBC__
    static const int64_t second_level = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return std::clamp<int64_t>(second_level, 1 << 20, 2 << 20) * 3 / 4;
#else
    return 768 << 10;
#endif
}

// Memory of that size is often fresh, and a page fault for every 4 KiB can take a third of the time of a
// sparse product. The system is asked for pages of 2 MiB, and may refuse.
void advise_huge_pages(void* data, int64_t bytes) {
    constexpr int64_t kLeastBytes = 4 << 20;
    if (bytes < kLeastBytes) return;
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

// Hands out areas of the workspace; with no memory behind it, it counts.
class Workspace {
  public:
    explicit Workspace(void* base) : base_(base) {}
    std::byte* take(int64_t bytes) {
        std::byte* area = base_ ? offset(base_, size_) : nullptr;
        size_ += round_up(bytes, 256);
        return area;
    }
    size_t size() const { return size_; }

  private:
    void* base_;
    int64_t size_ = 0;
};

// A rectangle of features x tokens of an operand, copied with zeros where tokens are padding.
struct Rectangle {
    int64_t feature, features;
    int64_t token, tokens, padded_tokens;
};

// Copies a rectangle of an operand to [features, tokens], or to [tokens, features] if tokens_first; the
// order of memory says which of them are multiplied in pairs: those along which sums are taken. `target_ld`:
// elements from one line of the copy to the next.
void pack_rectangle(const Steps& steps, DType dtype, const Matrix& from, const Rectangle& rectangle,
                    bool tokens_first, bool pair_tokens, void* target, int64_t target_ld) {
    const bool row_major = from.layout == Layout::row_major;
    const int64_t first = row_major ? rectangle.token * from.ld + rectangle.feature
                                    : rectangle.feature * from.ld + rectangle.token;
    const bool pair_ld = tokens_first != pair_tokens;
    Pack pack{offset(from.data, first * element_size(dtype)),
              from.ld,
              rectangle.features,
              rectangle.tokens,
              rectangle.features,
              rectangle.padded_tokens,
              target,
              pair_ld ? target_ld / steps.pair : target_ld,
              row_major != tokens_first,
              row_major == pair_tokens};
    if (row_major) {
        std::swap(pack.rows, pack.cols);
        std::swap(pack.padded_rows, pack.padded_cols);
    }
    steps.pack(pack);
}

// ---- dds ----

class Dds {
  public:
    Dds(const Steps& steps, const Problem& problem, const Device& device, void* memory)
        : steps_(steps),
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
        const int64_t packed_tokens = by_tokens_        ? 0
                                      : own_chunks_ > 0 ? device.multiprocessors * chunk_
                                                        : std::min(wave_, round_up(p_.tokens, steps_.lanes));
        panels_ = workspace_.take(packed_tokens * depth_ * steps_.packed_size);
        values_ = workspace_.take(device.multiprocessors * (kTaskFeatures / rows_) * value_bytes_);
    }

    size_t workspace_size() const { return workspace_.size(); }

    void run() const {
        // With gaps between its lines the memory is not the result's alone.
        const bool row_major = output_.layout == Layout::row_major;
        if (output_.ld == (row_major ? features_ : p_.tokens))
            advise_huge_pages(output_.data, p_.tokens * features_ * element_size(p_.dtype));
        in_parallel(threads_, [this](Member& member) {
            if (own_chunks_ > 0) return run_own_chunks(member);
            for (int64_t wave = 0; wave < p_.tokens; wave += wave_)
                run_wave(member, wave, std::min(wave + wave_, p_.tokens));
        });
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
            for (int64_t feature = 0; feature < features_; feature += kTaskFeatures)
                compute(panels, feature, std::min(feature + kTaskFeatures, features_), begin, end,
                        member.thread());
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
        const int64_t panel_bytes = std::max<int64_t>(depth_, 1) * steps_.tile * steps_.packed_size;
        chunk_ = std::clamp<int64_t>(cache_bytes() / panel_bytes, ceil_div(kLeastChunkTokens, steps_.tile),
                                     kChunkTokens / steps_.tile) *
                 steps_.tile;
        task_features_ = kTaskFeatures;
        if (p_.tokens >= threads * kLeastChunkTokens) {
            own_chunks_ = threads * ceil_div(p_.tokens, threads * chunk_);
            chunk_ = ceil_div(ceil_div(p_.tokens, steps_.lanes), own_chunks_) * steps_.lanes;
            return;
        }
        if (ceil_div(features_, task_features_) * ceil_div(p_.tokens, chunk_) < tasks) {
            task_features_ = rows_;
            chunk_ = steps_.tile;
        }
        wave_ = chunk_ * ceil_div(tasks, ceil_div(features_, task_features_));
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
            steps_, p_.dtype, input_,
            {feature, std::min(kPackedFeatures, input_features_ - feature), token, tokens, width}, false,
            false, offset(panel(panels, token), feature / steps_.pair * width * steps_.packed_size), width);
    }

    // Computes features [feature, feature_end) of tokens [token, token_end), tile by tile, in one thread.
    void compute(const Panels& panels, int64_t feature, int64_t feature_end, int64_t token, int64_t token_end,
                 int thread) const {
        alignas(64) std::byte sums[kSumBytes];
        Strip strips[kTaskFeatures / kMinRows];
        const int64_t count = (feature_end - feature) / rows_;
        const int64_t place = thread * (kTaskFeatures / rows_);
        for (int64_t i = 0; i < count; ++i) strips[i] = strip_of(feature + i * rows_, place + i);
        for (; token < token_end; token += steps_.tile) {
            const int64_t tokens = tile_tokens(token, token_end);
            const Output output = output_of(feature, feature_end - feature, token, tokens, sums);
            prefetch_output(output, element_size(p_.dtype));
            for (int64_t i = 0; i < count; ++i) {
                if (by_tokens_)
                    multiply_tokens(strips[i], token, tokens, reinterpret_cast<float*>(sums) + i * rows_);
                else
                    multiply(strips[i], panel(panels, token),
                             offset(sums, i * rows_ * output.sums_ld * steps_.packed_size), output.sums_ld);
            }
            steps_.finish(output);
        }
    }

    void multiply(Strip& strip, const void* panel, void* sums, int64_t columns) const {
        strip.b = panel;
        strip.columns = columns;
        strip.sums = sums;
        steps_.multiply(strip);
    }

    void multiply_tokens(const Strip& strip, int64_t token, int64_t tokens, float* sums) const {
        const int64_t ld = input_.ld * element_size(p_.dtype);
        steps_.multiply_tokens({offset(input_.data, token * ld), ld, strip.a, strip.idx, strip.entries,
                                strip.depth, tokens, sums, kTaskFeatures});
    }

    // The strip that begins at a feature, all but its tokens. Values that are packed get one of the places.
    Strip strip_of(int64_t feature, int64_t place) const {
        const int64_t row = feature / block_, first = adjacency_.ptr[row];
        Strip strip{};
        strip.entries = adjacency_.ptr[row + 1] - first;
        strip.idx = adjacency_.idx + first;
        strip.depth = depth_block_;
        strip.rows = rows_;
        set_values(strip, adjacency_.slot + first, feature % block_, place);
        return strip;
    }

    void set_values(Strip& strip, const int32_t* slots, int64_t within, int64_t place) const {
        if (direct_) {
            strip.a = block_rows(0, within);
            strip.slot = slots;
            strip.a_entry = block_ * depth_block_;
            strip.a_row = forward_ ? depth_block_ : 1;
            strip.a_step = forward_ ? 1 : block_;
        } else {
            strip.a = offset(values_, place * value_bytes_);
            strip.a_entry = rows_ * depth_block_;
            strip.a_row = depth_block_;
            strip.a_step = 1;
            pack_values(slots, strip.entries, within, strip.a);
        }
    }

    // Where the features [within, within + rows) of a block begin.
    const void* block_rows(int64_t slot, int64_t within) const {
        const int64_t rows = p_.pattern.block_rows, cols = p_.pattern.block_cols;
        return offset(p_.values.data,
                      (slot * rows * cols + within * (forward_ ? cols : 1)) * element_size(p_.dtype));
    }

    // Copies those features of blocks to [entries, rows, depth_block], or with the last two exchanged.
    void pack_values(const int32_t* slots, int64_t entries, int64_t within, const void* target) const {
        constexpr int64_t ahead = 4;  // blocks are too small for the processor to see where they lie
        const int64_t depths = depth_block_ * steps_.pair, size = element_size(p_.dtype);
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

    Output output_of(int64_t feature, int64_t features, int64_t token, int64_t columns, void* sums) const {
        const bool row_major = output_.layout == Layout::row_major;
        const auto first = [&](int64_t ld) {
            return row_major ? token * ld + feature : feature * ld + token;
        };
        const int64_t size = element_size(p_.dtype);
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
                p_.gate_activation};
    }

    const Steps& steps_;
    const Problem& p_;
    const bool forward_;
    const Matrix input_, output_;
    const Adjacency adjacency_;
    const int64_t block_,
        depth_block_;  // sides of a block; depths are counted in pairs where there are pairs
    const int64_t features_, input_features_, depth_;
    const int64_t rows_;
    const bool by_tokens_;  // activations are read where they lie, and blocks of W have to be packed anyway
    const bool direct_;     // values are read where they lie
    const int threads_;
    const int64_t value_bytes_;
    int64_t own_chunks_ = 0;                // of tokens, each of one thread
    int64_t chunk_, task_features_, wave_;  // tokens, features and tokens
    Workspace workspace_;
    std::byte* panels_;
    std::byte* values_;  // of each thread
};

// ---- dds of few tokens ----

// Forward, to row-major results. Blocks of W are read where they lie, as vectors along k.
class FewTokens {
  public:
    static bool suits(const Steps& steps, const Problem& problem) {
        return problem.forward() && problem.tokens <= steps.few_tokens &&
               problem.output().layout == Layout::row_major;
    }

    FewTokens(const Steps& steps, const Problem& problem, const Device& device, void* memory)
        : steps_(steps),
          p_(problem),
          adjacency_(p_.block_rows()),
          rows_(std::min<int64_t>(p_.row_block(), kMaxRows)),
          element_(element_size(p_.dtype)),
          packed_element_(steps_.packed_size / steps_.pair),
          packs_(p_.tokens > 1 || packed_element_ != element_ || p_.input().layout != Layout::row_major),
          x_ld_(p_.k_size() + kLine / packed_element_),
          threads_(std::min(max_threads(), device.multiprocessors)),
          workspace_(memory) {
        const bool many = ceil_div(p_.features(), kTaskFeatures) >= kThreadTasks * device.multiprocessors;
        task_features_ = many ? kTaskFeatures : rows_;
        x_ = packs_ ? workspace_.take(p_.tokens * x_ld_ * packed_element_) : nullptr;
    }

    size_t workspace_size() const { return workspace_.size(); }

    void run() const {
        in_parallel(threads_, [this](Member& member) {
            if (packs_) {
                member.share(ceil_div(p_.k_size(), kPackedFeatures), [&](int64_t i) {
                    const int64_t feature = i * kPackedFeatures,
                                  features = std::min(kPackedFeatures, p_.k_size() - feature);
                    pack_rectangle(steps_, p_.dtype, p_.input(), {feature, features, 0, p_.tokens, p_.tokens},
                                   true, false, offset(x_, feature * packed_element_), x_ld_);
                });
                member.wait();
            }
            member.draw(ceil_div(p_.features(), task_features_), 1, [&](int64_t i, int64_t) {
                const int64_t feature = i * task_features_;
                compute(feature, std::min(task_features_, p_.features() - feature));
            });
        });
    }

  private:
    static constexpr int64_t kLine = 64;  // bytes, by which lines of x are longer: places of a cache differ

    // Computes as many features from `feature` on.
    void compute(int64_t feature, int64_t features) const {
        alignas(64) std::byte sums[kMostFewTokens * kTaskFeatures * sizeof(double)];
        const Output output = output_of(feature, features, sums);
        prefetch_output(output, element_);
        const int64_t block_rows = p_.pattern.block_rows, block_cols = p_.pattern.block_cols;
        for (int64_t first = 0; first < features; first += rows_) {
            const int64_t row = (feature + first) / block_rows, within = (feature + first) % block_rows;
            const int64_t begin = adjacency_.ptr[row];
            steps_.multiply_few({packs_ ? x_ : p_.input().data, packs_ ? x_ld_ : p_.input().ld,
                                 offset(p_.values.data, within * block_cols * element_),
                                 adjacency_.slot + begin, block_rows * block_cols, adjacency_.idx + begin,
                                 adjacency_.ptr[row + 1] - begin, block_cols, rows_, p_.tokens,
                                 offset(sums, first * std::max<int64_t>(element_, sizeof(float))),
                                 kTaskFeatures});
        }
        steps_.finish(output);
    }

    Output output_of(int64_t feature, int64_t features, void* sums) const {
        const auto at = [&](const void* data) { return data ? offset(data, feature * element_) : nullptr; };
        return {sums,     kTaskFeatures,     p_.tokens, features,      at(p_.output().data), p_.output().ld,
                false,    at(p_.bias),       true,      p_.activation, at(p_.residual.data), p_.residual.ld,
                p_.gated, p_.gate_activation};
    }

    const Steps& steps_;
    const Problem& p_;
    const Adjacency adjacency_;
    const int64_t rows_;
    const int64_t element_, packed_element_;  // bytes
    const bool packs_;                        // x, which else is read where it lies
    const int64_t x_ld_;                      // once packed
    const int threads_;
    int64_t task_features_;
    Workspace workspace_;
    std::byte* x_;
};

// ---- sdd ----

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

    void run() const {
        const int64_t outs = p_.pattern.out_features, ins = p_.pattern.in_features;
        advise_huge_pages(p_.values.data, p_.pattern.value_count() * element_size(p_.dtype));
        in_parallel(threads_, [&](Member& member) {
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
        });
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
            pack_rectangle(steps_, p_.dtype, from,
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
        Strip strip{};
        strip.entries = slabs_;
        strip.depth = slab_ / steps_.pair;
        strip.a_entry = rows_ * strip.depth;
        strip.a_row = y_tokens_first_ ? 1 : strip.depth;
        strip.a_step = y_tokens_first_ ? rows_ : 1;
        strip.rows = rows_;
        strip.columns = tile_;
        strip.sums = sums;
        for (int64_t n = 0; n < block_rows_; n += rows_)
            for (int64_t k = 0; k < block_cols_; k += tile_) {
                strip.a = offset(y_panels_, (row * block_rows_ + n) % y_wave_ * feature_bytes_);
                strip.b = offset(x_panels_, (col * block_cols_ + k) % x_wave_ * feature_bytes_);
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
                                    Activation::none};
                prefetch_output(output, size);
                steps_.multiply(strip);
                finish_(output);
            }
    }

    const Steps& steps_;
    void (*const finish_)(const Output&);
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

// ---- registry ----

template <const InstructionSet& set>
const char* refuses(const Problem& problem, const Device&) {
    const bool is_wide = problem.op == Op::sdd_tn && problem.result_dtype == DType::float32 &&
                         element_size(problem.dtype) == 2;
    if (problem.result_dtype != problem.dtype && !is_wide)
        return "of other dtypes than the activations' it writes float32 alone, for sdd_tn of 16 bits";
    return set.available() ? nullptr : set.missing;
}

// The product of the problem, or with no memory behind it what counts the workspace.
template <const InstructionSet& set>
Sdd sdd_of(const Problem& problem, const Device& device, void* memory) {
    return {set.steps[static_cast<int>(problem.dtype)],
            set.steps[static_cast<int>(problem.result_dtype)].finish, problem, device, memory};
}

// Whether a product writes nothing.
bool is_empty(const Problem& problem) {
    if (problem.op == Op::sdd_tn) return problem.pattern.nnz == 0;
    return problem.tokens == 0 || problem.features() == 0;
}

template <const InstructionSet& set>
size_t workspace_size(const Problem& problem, const Device& device) {
    if (is_empty(problem)) return 0;
    if (problem.op == Op::sdd_tn) return sdd_of<set>(problem, device, nullptr).workspace_size();
    const Steps& steps = set.steps[static_cast<int>(problem.dtype)];
    if (FewTokens::suits(steps, problem)) return FewTokens(steps, problem, device, nullptr).workspace_size();
    return Dds(steps, problem, device, nullptr).workspace_size();
}

template <const InstructionSet& set>
int32_t launch(const Problem& problem, const Device& device, void* memory, void*) {
    if (is_empty(problem)) return 0;
    advise_huge_pages(memory, workspace_size<set>(problem, device));
    const Steps& steps = set.steps[static_cast<int>(problem.dtype)];
    if (problem.op == Op::sdd_tn)
        sdd_of<set>(problem, device, memory).run();
    else if (FewTokens::suits(steps, problem))
        FewTokens(steps, problem, device, memory).run();
    else
        Dds(steps, problem, device, memory).run();
    return 0;
}

template <const InstructionSet& set>
constexpr Kernel row(const char* name, uint32_t dtypes) {
    Kernel row{
        name,         DeviceType::cpu,     0,          0b111, dtypes, Precision::highest, {0, 0}, 0, 0, 0,
        refuses<set>, workspace_size<set>, launch<set>};
    row.result_dtypes = dtypes | 1u << static_cast<int>(DType::float32);  // see refuses
    return row;
}

constexpr uint32_t kEveryDType = 0b1111;
[[maybe_unused]] constexpr uint32_t kBFloat16 = 1u << static_cast<int>(DType::bfloat16);

constexpr Kernel kKernels[] = {
#ifdef __x86_64__
    row<amx_bf16>("cpu_amx_bf16", kBFloat16),   row<avx512_bf16>("cpu_avx512_bf16", kBFloat16),
    row<avx512>("cpu_avx512", kEveryDType),     row<avx2>("cpu_avx2", kEveryDType),
#endif
    row<portable>("cpu_portable", kEveryDType),
};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

}  // namespace ts::cpu
