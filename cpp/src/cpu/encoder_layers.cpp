#include "cpu/encoder_layers.h"

#include <algorithm>
#include <cstdint>

#include "cpu/memory.h"
#include "cpu/products.h"
#include "threads.h"

namespace ts::cpu {
namespace {

constexpr int64_t kGroupTokens = 128;        // of sentences that one thread takes through all layers
constexpr int64_t kPackedGroupTokens = 256;  // with packed values, which are read once for a group
constexpr int64_t kCachedBytes = 2 << 20;  // of values of a layer; groups are twice as long if there are more
constexpr int64_t kChunkTokens = 64;       // then, whose float32 of the widest products stay in the cache
constexpr int64_t kLeastTokens = 32;       // for each thread, or else all of them share every step
constexpr int64_t kFewTokens = 96;         // whose rows every thread computes for itself
constexpr int64_t kThreadProducts = 1 << 25;  // that make up for a thread's waiting for others

// Sentences one after another.
struct Group {
    int64_t first, last;  // sentences
    int64_t token, tokens;
};

class Run {
  public:
    Run(const InstructionSet& set, const Encoder& encoder, const Device& device)
        : set_(set),
          steps_(*set.encoder),
          products_(set.steps[static_cast<int>(DType::int8)]),
          finish_(steps_.finish),
          e_(encoder),
          team_(device),
          alone_{device.type, device.compute_capability, 1, device.shared_memory} {
        for (int64_t i = 0; i < e_.sentences; ++i) longest_ = std::max(longest_, length(i));
        is_packed_ = true;
        int64_t most_bytes = 0;
        for (const EncoderLayer& layer : e_.layers) {
            int64_t bytes = 0;
            for (const Problem* p : {&layer.qkv, &layer.output, &layer.up, &layer.down}) {
                is_packed_ = is_packed_ && is_packed(*p);
                bytes += p->pattern.value_count();
            }
            most_bytes = std::max(most_bytes, bytes);
        }
        most_tokens_ = !is_packed_ ? kGroupTokens : (1 + (most_bytes > kCachedBytes)) * kPackedGroupTokens;
        group_tokens_ = std::min(e_.tokens, most_tokens_ + longest_);
    }

    // Memory for all sentences in a team, or for a group in every thread.
    size_t workspace_size() const {
        const int64_t threads = team_.multiprocessors;
        size_t bytes = threads * Area(*this, nullptr, group_tokens_, alone_).size();
        if (e_.tokens < threads * least_tokens()) {
            const size_t shared = Area(*this, nullptr, e_.tokens, team_).size();
            bytes = std::max(bytes, e_.tokens <= kFewTokens ? threads * shared : shared);
        }
        return bytes;
    }

    void run(void* workspace) const {
        if (e_.tokens == 0) return;
        const int threads = std::min<int64_t>(std::min(max_threads(), team_.multiprocessors),
                                              std::max<int64_t>(ceil_div(products(), kThreadProducts), 1));
        if (threads > 1 && e_.tokens < threads * least_tokens()) {
            const size_t bytes = Area(*this, nullptr, e_.tokens, team_).size();
            in_parallel(threads, [&](Member& member) {
                const bool few = e_.tokens <= kFewTokens;
                const Area shared(*this, workspace, e_.tokens, team_);
                Area own(*this, offset(workspace, few ? member.thread() * bytes : 0), e_.tokens, team_);
                own.share(shared);
                run_layers({0, e_.sentences, 0, e_.tokens}, own, member,
                           few ? Sharing::features : Sharing::all);
            });
            return;
        }
        const int64_t groups = threads * ceil_div(e_.tokens, threads * most_tokens_);
        const size_t bytes = Area(*this, nullptr, group_tokens_, alone_).size();
        in_parallel(threads, [&](Member& member) {
            const Area area(*this, offset(workspace, member.thread() * bytes), group_tokens_, alone_);
            Team own;
            Member alone(own);
            member.draw(groups, 1, [&](int64_t i, int64_t) {
                const int64_t first = sentence_at(i, groups), last = sentence_at(i + 1, groups);
                const int64_t token = e_.offsets[first];
                if (e_.offsets[last] > token)
                    run_layers({first, last, token, e_.offsets[last] - token}, area, alone, Sharing::nothing);
            });
        });
    }

  private:
    // The work that the threads of a team share: none of it, as every group has a thread; all steps; or the
    // features of products and heads, where every thread computes all rows for itself, to wait less often.
    enum class Sharing { nothing, all, features };

    // Quantized rows, with room for what PanelProduct reads.
    struct Rows {
        Rows() = default;
        Rows(Workspace& workspace, int64_t tokens, int64_t features)
            : data(reinterpret_cast<int8_t*>(workspace.take((tokens + kPanelFeatures) * features + 64))),
              scales(reinterpret_cast<float*>(workspace.take(tokens * sizeof(float)))) {}

        int8_t* data = nullptr;
        float* scales = nullptr;
    };

    // The memory of a group.
    struct Area {
        Area(const Run& run, void* base, int64_t tokens, const Device& device) : workspace(base) {
            const int64_t threads = device.multiprocessors, hidden = run.e_.hidden;
            int64_t narrow = hidden, wide = 0, most = 0;
            size_t product = 0;
            for (const EncoderLayer& layer : run.e_.layers) {
                narrow = std::max(narrow, layer.attended());
                most = std::max({most, layer.attended(), layer.inner()});
                wide = std::max({wide, 3 * layer.attended(), layer.up.pattern.out_features});
                attention_bytes =
                    std::max(attention_bytes,
                             round_up(run.steps_.attention_bytes(run.longest_, layer.head_features), 256));
                for (const Problem* p : {&layer.qkv, &layer.output, &layer.up, &layer.down})
                    if (!run.is_packed(*p))
                        product = std::max({product, run.product_bytes(*p, tokens, device),
                                            run.product_bytes(*p, tokens, run.alone_)});
            }
            // Rows of a chunk alone.
            const int64_t chunk =
                threads == 1 && run.is_packed_ ? std::min(tokens, kChunkTokens + run.longest_) : tokens;
            state = take<float>(tokens * hidden);
            outer = Rows(workspace, tokens, hidden);
            inner = Rows(workspace, tokens, most);
            wide_rows = take<float>(chunk * wide);
            narrow_rows = take<float>(tokens * narrow);
            row_size = std::max(hidden, most);
            rows = take<float>(threads * row_size);
            attended_rows = take<float>(chunk * narrow);
            attention = workspace.take(threads * attention_bytes);
            products = workspace.take(static_cast<int64_t>(product));
        }

        size_t size() const { return workspace.size(); }

        // Takes what all threads write in place of its own.
        void share(const Area& other) {
            wide_rows = other.wide_rows;
            attended_rows = other.attended_rows;
            narrow_rows = other.narrow_rows;
        }

        template <class T>
        T* take(int64_t count) {
            return reinterpret_cast<T*>(workspace.take(count * static_cast<int64_t>(sizeof(T))));
        }

        Workspace workspace;
        float* state;      // activations between layers
        Rows outer;        // that products of hidden features multiply
        Rows inner;        // that the products after them multiply
        float* wide_rows;  // q, k and v, or what the first product of the MLP gives
        float* attended_rows;
        float* narrow_rows;  // what products of hidden features give
        float* rows;         // one for each thread
        int64_t row_size;
        std::byte* attention;
        std::byte* products;
        int64_t attention_bytes = 0;  // of each thread
    };

    // Tokens that a thread has if every thread has sentences of its own.
    int64_t least_tokens() const { return std::max(kLeastTokens, longest_); }

    // Multiplications of all products.
    int64_t products() const {
        int64_t count = 0;
        for (const EncoderLayer& layer : e_.layers)
            for (const Problem* p : {&layer.qkv, &layer.output, &layer.up, &layer.down})
                count += p->pattern.value_count();
        return count * e_.tokens;
    }

    int64_t length(int64_t sentence) const {
        return e_.offsets[sentence + 1] - int64_t{e_.offsets[sentence]};
    }

    // The first sentence of a group, which begins at or after its part of all tokens.
    int64_t sentence_at(int64_t group, int64_t groups) const {
        if (group == groups) return e_.sentences;
        const int64_t token = group * e_.tokens / groups;
        return std::lower_bound(e_.offsets, e_.offsets + e_.sentences, token) - e_.offsets;
    }

    size_t product_bytes(const Problem& of, int64_t tokens, const Device& device) const {
        Problem problem = of;
        problem.tokens = tokens;
        problem.x.layout = problem.y.layout = Layout::row_major;
        size_t bytes = dds_workspace_size(products_, problem, device);
        problem.tokens = std::min<int64_t>(tokens, products_.decode_tokens);
        if (problem.tokens > 0 && suits_decode(products_, problem))
            bytes = std::max(bytes, decode_workspace_size(products_, problem, device));
        return bytes;
    }

    // Block rows [first, last) of a weight.
    static Problem rows_of(const Problem& of, int64_t first, int64_t last) {
        Problem problem = of;
        Pattern& pattern = problem.pattern;
        const int64_t feature = first * pattern.block_rows;
        pattern.out_features = (last - first) * pattern.block_rows;
        pattern.rows.ptr += first;
        pattern.nnz = pattern.rows.ptr[last - first] - pattern.rows.ptr[0];
        problem.values.scales += feature;
        if (of.bias != nullptr) problem.bias = offset(of.bias, feature * sizeof(float));
        return problem;
    }

    // Quantized rows of tokens [token, token + tokens) times a weight.
    void multiply(const Problem& of, const Rows& x, int64_t token, int64_t tokens, const Area& area,
                  float* result, Member& member, Sharing sharing) const {
        const int8_t* const from = x.data + token * of.pattern.in_features;
        if (is_packed(of)) {
            const int64_t panels = of.pattern.out_features / kPanelFeatures;
            const int threads = sharing == Sharing::nothing ? 1 : member.threads();
            const int thread = sharing == Sharing::nothing ? 0 : member.thread();
            steps_.multiply_panels({packed_values(of.pattern, of.prepacked), panels * thread / threads,
                                    panels * (thread + 1) / threads, from, of.pattern.in_features, tokens,
                                    x.scales + token, of.values.scales, static_cast<const float*>(of.bias),
                                    of.activation, result, of.pattern.out_features});
            if (threads > 1) member.wait();
            return;
        }
        const int64_t rows = of.pattern.out_features / of.pattern.block_rows;
        const int64_t first = sharing == Sharing::features ? rows * member.thread() / member.threads() : 0;
        const int64_t last =
            sharing == Sharing::features ? rows * (member.thread() + 1) / member.threads() : rows;
        Problem problem = rows_of(of, first, last);
        problem.tokens = tokens;
        problem.x = {const_cast<int8_t*>(from), of.pattern.in_features, Layout::row_major};
        problem.x_scales = x.scales + token;
        problem.y = {result + first * of.pattern.block_rows, of.pattern.out_features, Layout::row_major};
        Team own;
        Member alone(own);
        Member& team = sharing == Sharing::features ? alone : member;
        const Device& device = sharing == Sharing::all ? team_ : alone_;
        if (problem.pattern.out_features > 0) {
            if (suits_decode(products_, problem))
                decode(products_, finish_, problem, device, area.products, &team);
            else
                dds(products_, finish_, problem, device, area.products, &team);
        }
        if (sharing == Sharing::features) member.wait();
    }

    bool is_packed(const Problem& of) const {
        return steps_.multiply_panels != nullptr && of.prepacked != nullptr &&
               of.pattern.block_rows % kPanelFeatures == 0;
    }

    // Calls body(i) for tokens [token, token + tokens).
    void each_row(int64_t token, int64_t tokens, Member& member, Sharing sharing, const auto& body) const {
        if (sharing == Sharing::features) {
            for (int64_t i = 0; i < tokens; ++i) body(token + i);
            return;
        }
        member.share(tokens, [&](int64_t i) { body(token + i); });
        member.wait();
    }

    // Quantizes a row of float32 as it is.
    void quantize(const float* row, int64_t features, const Rows& to, int64_t token) const {
        steps_.row[0][0]({row,
                          nullptr,
                          nullptr,
                          {},
                          {},
                          to.data + token * features,
                          to.scales + token,
                          nullptr,
                          features});
    }

    // Calls body(sentences and their tokens) for a chunk after the other, or for all of a group at once.
    void each_chunk(const Group& group, Sharing sharing, const auto& body) const {
        if (!is_packed_ || sharing != Sharing::nothing) return body(group);
        for (int64_t first = group.first; first < group.last;) {
            int64_t last = first + 1;
            const int64_t token = e_.offsets[first];
            while (last < group.last && e_.offsets[last + 1] - token <= kChunkTokens) ++last;
            body(Group{first, last, token, e_.offsets[last] - token});
            first = last;
        }
    }

    void run_layers(const Group& group, const Area& area, Member& member, Sharing sharing) const {
        const int64_t hidden = e_.hidden;
        const bool is_half = e_.dtype == DType::bfloat16;
        const int64_t size = element_size(e_.dtype);
        float* const row = area.rows + member.thread() * area.row_size;
        const Rows &outer = area.outer, &inner = area.inner;
        const EncoderLayer& begin = e_.layers.front();
        each_row(0, group.tokens, member, sharing, [&](int64_t i) {
            steps_.row[is_half][0]({offset(e_.x.data, (group.token + i) * e_.x.ld * size),
                                    nullptr,
                                    area.state + i * hidden,
                                    {},
                                    begin.norm_first ? begin.attention_norm : EncoderNorm{},
                                    outer.data + i * hidden,
                                    outer.scales + i,
                                    row,
                                    hidden});
        });
        for (const EncoderLayer& layer : e_.layers) {
            const int64_t attended = layer.attended();
            each_chunk(group, sharing, [&](const Group& chunk) {
                const int64_t token = chunk.token - group.token;
                multiply(layer.qkv, outer, token, chunk.tokens, area, area.wide_rows, member, sharing);
                attend(layer, chunk, area, member);
                each_row(0, chunk.tokens, member, sharing, [&](int64_t i) {
                    quantize(area.attended_rows + i * attended, attended, inner, token + i);
                });
            });
            multiply(layer.output, inner, 0, group.tokens, area, area.narrow_rows, member, sharing);
            each_row(0, group.tokens, member, sharing, [&](int64_t i) {
                float* const state = area.state + i * hidden;
                const EncoderNorm none{}, &norm = layer.attention_norm, &next = layer.mlp_norm;
                steps_.row[0][0]({state, area.narrow_rows + i * hidden, state, layer.norm_first ? none : norm,
                                  layer.norm_first ? next : none, outer.data + i * hidden, outer.scales + i,
                                  row, hidden});
            });
            const int64_t width = layer.up.pattern.out_features, features = layer.inner();
            const int64_t chunk = is_packed_ && sharing == Sharing::nothing ? kChunkTokens : group.tokens;
            for (int64_t token = 0; token < group.tokens; token += chunk) {
                const int64_t tokens = std::min(chunk, group.tokens - token);
                multiply(layer.up, outer, token, tokens, area, area.wide_rows, member, sharing);
                each_row(0, tokens, member, sharing, [&](int64_t i) {
                    const float* const from = area.wide_rows + i * width;
                    if (layer.gated) steps_.gate({from, row, features, layer.activation});
                    quantize(layer.gated ? row : from, features, inner, token + i);
                });
            }
            multiply(layer.down, inner, 0, group.tokens, area, area.narrow_rows, member, sharing);
            const bool is_last = &layer == &e_.layers.back();
            const EncoderLayer* const next = is_last ? nullptr : &layer + 1;
            each_row(0, group.tokens, member, is_last ? Sharing::all : sharing, [&](int64_t i) {
                float* const state = area.state + i * hidden;
                void* const result =
                    is_last ? static_cast<void*>(offset(e_.y.data, (group.token + i) * e_.y.ld * size))
                            : state;
                steps_.row[0][is_last && is_half](
                    {state, area.narrow_rows + i * hidden, result,
                     layer.norm_first ? EncoderNorm{} : layer.mlp_norm,
                     next != nullptr && next->norm_first ? next->attention_norm : EncoderNorm{},
                     is_last ? nullptr : outer.data + i * hidden, outer.scales + i, row, hidden});
            });
        }
    }

    void attend(const EncoderLayer& layer, const Group& group, const Area& area, Member& member) const {
        const int64_t features = layer.head_features, attended = layer.attended(), ld = 3 * attended;
        std::byte* const scratch = area.attention + member.thread() * area.attention_bytes;
        member.draw((group.last - group.first) * layer.heads, 1, [&](int64_t i, int64_t) {
            const int64_t sentence = group.first + i / layer.heads, head = i % layer.heads;
            const int64_t token = e_.offsets[sentence] - group.token, tokens = length(sentence);
            if (tokens == 0) return;
            const float* const q = area.wide_rows + token * ld + head * features;
            const float* const bias = layer.position_bias != nullptr
                                          ? layer.position_bias + head * (2 * layer.positions - 1)
                                          : nullptr;
            steps_.attention({q, q + attended, q + 2 * attended, ld, tokens, features, layer.window,
                              layer.positions, layer.scale, layer.rotary, bias,
                              area.attended_rows + token * attended + head * features, attended, scratch});
        });
    }

    const InstructionSet& set_;
    const EncoderSteps& steps_;
    const Steps& products_;
    const Finish finish_;
    const Encoder& e_;
    const Device team_, alone_;
    int64_t longest_ = 0;
    bool is_packed_;                      // all weights
    int64_t most_tokens_, group_tokens_;  // of a group, without and with those of the last sentence
};

}  // namespace

size_t encoder_workspace_size(const InstructionSet& set, const Encoder& encoder, const Device& device) {
    return Run(set, encoder, device).workspace_size();
}

void run_encoder(const InstructionSet& set, const Encoder& encoder, const Device& device, void* workspace) {
    Run(set, encoder, device).run(workspace);
}

}  // namespace ts::cpu
