#include "cpu/encoder.h"

#include <algorithm>
#include <cstdint>

#include "cpu/memory.h"
#include "cpu/products.h"
#include "threads.h"

namespace ts::cpu {
namespace {

constexpr int64_t kGroupTokens = 192;  // of sentences that one thread takes through all layers
constexpr int64_t kLeastTokens = 32;   // for each thread, or else all of them share every step

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
        group_tokens_ = std::min(e_.tokens, kGroupTokens + longest_);
    }

    // Memory for all sentences in one team, or for a group in every thread.
    size_t workspace_size() const {
        const size_t together = Area(*this, nullptr, e_.tokens, team_).size();
        const size_t apart = Area(*this, nullptr, group_tokens_, alone_).size();
        return std::max<size_t>(together, team_.multiprocessors * apart);
    }

    void run(void* workspace) const {
        if (e_.tokens == 0) return;
        const int threads = std::min(max_threads(), team_.multiprocessors);
        const int64_t most = e_.tokens / std::max(threads, 1);
        if (threads > 1 && (most < std::max(kLeastTokens, longest_))) {
            in_parallel(threads, [&](Member& member) {
                const Area area(*this, workspace, e_.tokens, team_);
                run_layers({0, e_.sentences, 0, e_.tokens}, area, team_, member);
            });
            return;
        }
        const int64_t groups = threads * ceil_div(e_.tokens, threads * kGroupTokens);
        in_parallel(threads, [&](Member& member) {
            const Area sizes(*this, nullptr, group_tokens_, alone_);
            const Area area(*this, offset(workspace, member.thread() * sizes.size()), group_tokens_, alone_);
            Team own;
            Member alone(own);
            member.draw(groups, 1, [&](int64_t i, int64_t) {
                const int64_t first = sentence_at(i, groups), last = sentence_at(i + 1, groups);
                const int64_t token = e_.offsets[first];
                if (e_.offsets[last] > token)
                    run_layers({first, last, token, e_.offsets[last] - token}, area, alone_, alone);
            });
        });
    }

  private:
    // The memory of a group.
    struct Area {
        Area(const Run& run, void* base, int64_t tokens, const Device& device) : workspace(base) {
            const int64_t threads = device.multiprocessors, hidden = run.e_.hidden;
            int64_t narrow = hidden, wide = 0, most = hidden;
            size_t product = 0;
            for (const EncoderLayer& layer : run.e_.layers) {
                narrow = std::max(narrow, layer.attended());
                most = std::max({most, layer.attended(), layer.inner()});
                wide = std::max({wide, 3 * layer.attended(), layer.up.pattern.out_features});
                attention_bytes =
                    std::max(attention_bytes,
                             round_up(run.steps_.attention_bytes(run.longest_, layer.head_features), 256));
                for (const Problem* p : {&layer.qkv, &layer.output, &layer.up, &layer.down})
                    product = std::max(product, run.product_bytes(*p, tokens, device));
            }
            state = take<float>(tokens * hidden);
            quantized = take<int8_t>(tokens * most);
            scales = take<float>(tokens);
            wide_rows = take<float>(tokens * wide);
            narrow_rows = take<float>(tokens * narrow);
            rows = take<float>(threads * round_up(hidden, 16));
            attention = workspace.take(threads * attention_bytes);
            products = workspace.take(static_cast<int64_t>(product));
        }

        size_t size() const { return workspace.size(); }

        template <class T>
        T* take(int64_t count) {
            return reinterpret_cast<T*>(workspace.take(count * static_cast<int64_t>(sizeof(T))));
        }

        Workspace workspace;
        float* state;       // activations between layers
        int8_t* quantized;  // what the next product multiplies
        float* scales;
        float* wide_rows;    // q, k and v, or what the first product of the MLP gives
        float* narrow_rows;  // results of attention, or of the products after it
        float* rows;         // one for each thread
        std::byte* attention;
        std::byte* products;
        int64_t attention_bytes = 0;  // of each thread
    };

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

    // The quantized rows times a weight.
    void multiply(const Problem& of, const Group& group, const Area& area, float* result,
                  const Device& device, Member& member) const {
        Problem problem = of;
        problem.tokens = group.tokens;
        problem.x = {area.quantized, of.pattern.in_features, Layout::row_major};
        problem.x_scales = area.scales;
        problem.y = {result, of.pattern.out_features, Layout::row_major};
        if (suits_decode(products_, problem))
            decode(products_, finish_, problem, device, area.products, &member);
        else
            dds(products_, finish_, problem, device, area.products, &member);
    }

    void each_row(const Group& group, Member& member, const auto& body) const {
        member.share(group.tokens, body);
        member.wait();
    }

    // Quantizes rows of float32 as they are.
    void quantize(const float* rows, int64_t features, const Area& area, int64_t token) const {
        steps_.row[0][0]({rows + token * features,
                          nullptr,
                          nullptr,
                          {},
                          {},
                          area.quantized + token * features,
                          area.scales + token,
                          const_cast<float*>(rows) + token * features,
                          features});
    }

    void run_layers(const Group& group, const Area& area, const Device& device, Member& member) const {
        const int64_t hidden = e_.hidden;
        const bool is_half = e_.dtype == DType::bfloat16;
        const int64_t size = element_size(e_.dtype);
        float* const row = area.rows + member.thread() * round_up(hidden, 16);
        const EncoderLayer& begin = e_.layers.front();
        each_row(group, member, [&](int64_t i) {
            steps_.row[is_half][0]({offset(e_.x.data, (group.token + i) * e_.x.ld * size),
                                    nullptr,
                                    area.state + i * hidden,
                                    {},
                                    begin.norm_first ? begin.attention_norm : EncoderNorm{},
                                    area.quantized + i * hidden,
                                    area.scales + i,
                                    row,
                                    hidden});
        });
        for (const EncoderLayer& layer : e_.layers) {
            multiply(layer.qkv, group, area, area.wide_rows, device, member);
            attend(layer, group, area, member);
            each_row(group, member,
                     [&](int64_t i) { quantize(area.narrow_rows, layer.attended(), area, i); });
            multiply(layer.output, group, area, area.narrow_rows, device, member);
            each_row(group, member, [&](int64_t i) {
                float* const state = area.state + i * hidden;
                const EncoderNorm none{}, &norm = layer.attention_norm, &next = layer.mlp_norm;
                steps_.row[0][0]({state, area.narrow_rows + i * hidden, state, layer.norm_first ? none : norm,
                                  layer.norm_first ? next : none, area.quantized + i * hidden,
                                  area.scales + i, row, hidden});
            });
            multiply(layer.up, group, area, area.wide_rows, device, member);
            const int64_t width = layer.up.pattern.out_features, inner = layer.inner();
            each_row(group, member, [&](int64_t i) {
                float* const from = area.wide_rows + i * width;
                if (layer.gated) steps_.gate({from, inner, layer.activation});
                steps_.row[0][0]({from,
                                  nullptr,
                                  nullptr,
                                  {},
                                  {},
                                  area.quantized + i * inner,
                                  area.scales + i,
                                  from,
                                  inner});
            });
            multiply(layer.down, group, area, area.narrow_rows, device, member);
            const bool is_last = &layer == &e_.layers.back();
            const EncoderLayer* const next = is_last ? nullptr : &layer + 1;
            each_row(group, member, [&](int64_t i) {
                float* const state = area.state + i * hidden;
                void* const result =
                    is_last ? static_cast<void*>(offset(e_.y.data, (group.token + i) * e_.y.ld * size))
                            : state;
                steps_.row[0][is_last && is_half](
                    {state, area.narrow_rows + i * hidden, result,
                     layer.norm_first ? EncoderNorm{} : layer.mlp_norm,
                     next != nullptr && next->norm_first ? next->attention_norm : EncoderNorm{},
                     is_last ? nullptr : area.quantized + i * hidden, area.scales + i, row, hidden});
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
                              area.narrow_rows + token * attended + head * features, attended, scratch});
        });
    }

    const InstructionSet& set_;
    const EncoderSteps& steps_;
    const Steps& products_;
    const Finish finish_;
    const Encoder& e_;
    const Device team_, alone_;
    int64_t longest_ = 0;
    int64_t group_tokens_;  // at most
};

}  // namespace

size_t encoder_workspace_size(const InstructionSet& set, const Encoder& encoder, const Device& device) {
    return Run(set, encoder, device).workspace_size();
}

void run_encoder(const InstructionSet& set, const Encoder& encoder, const Device& device, void* workspace) {
    Run(set, encoder, device).run(workspace);
}

}  // namespace ts::cpu
