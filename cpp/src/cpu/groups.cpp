// Grouped products: that of each group on its tokens, one by one or side by side.
#include <algorithm>
#include <cstdint>

#include "cpu/memory.h"
#include "cpu/products.h"
#include "threads.h"

namespace ts::cpu {
namespace {

void move(Matrix& matrix, int64_t token, DType dtype) {
    if (matrix.data != nullptr) matrix.data = offset(matrix.data, token * matrix.ld * element_size(dtype));
}

class Groups {
  public:
    Groups(const Steps& steps, Finish finish, const Problem& problem, const Device& device)
        : steps_(steps),
          finish_(finish),
          p_(problem),
          team_(device),
          alone_{device.type, device.compute_capability, 1, device.shared_memory},
          most_alone_(p_.tokens / (kThreadTasks * device.multiprocessors)),
          team_bytes_(bytes_for(p_.tokens, team_)),
          alone_bytes_(round_up(bytes_for(most_alone_, alone_), 256)) {}

    // The workspace of all groups of few tokens at a time, or of one group of many tokens.
    size_t workspace_size() const {
        return std::max<size_t>(team_bytes_, team_.multiprocessors * alone_bytes_);
    }

    // All threads share a group of many tokens; of the others each thread computes whole ones. Neither
    // changes a result.
    void run(void* workspace) const {
        const int32_t groups = p_.pattern.groups;
        advise();
        in_parallel(std::min(max_threads(), team_.multiprocessors), [&](Member& member) {
            for (int32_t group = 0; group < groups; ++group)
                if (tokens_of(group) > most_alone_) run_group(group, team_, workspace, member);
            Team own;
            Member alone(own);
            member.draw(groups, 1, [&](int64_t group, int64_t) {
                void* const area = offset(workspace, member.thread() * alone_bytes_);
                if (tokens_of(group) <= most_alone_) run_group(group, alone_, area, alone);
            });
        });
    }

  private:
    int64_t tokens_of(int64_t group) const { return p_.offsets[group + 1] - int64_t{p_.offsets[group]}; }

    bool has_work(const Problem& problem) const {
        return p_.op == Op::sdd_tn ? problem.pattern.nnz > 0 : problem.tokens > 0;
    }

    void run_group(int64_t group, const Device& device, void* workspace, Member& member) const {
        const Problem problem = problem_of(group);
        if (!has_work(problem)) return;
        if (p_.op == Op::sdd_tn)
            sdd(steps_, finish_, problem, device, workspace, &member);
        else if (suits_decode(steps_, problem))
            decode(steps_, finish_, problem, device, workspace, &member);
        else
            dds(steps_, finish_, problem, device, workspace, &member);
    }

    // A group by itself has a part of each operand but all values, in which slots lead to its own.
    Problem problem_of(int64_t group) const {
        Problem problem = p_;
        Pattern& pattern = problem.pattern;
        pattern.out_features = p_.pattern.group_out_features();
        pattern.groups = 1;
        const bool by_column = p_.op == Op::dds_nn;
        Adjacency& lines = by_column ? pattern.cols : pattern.rows;
        const int64_t count =
            by_column ? pattern.in_features / pattern.block_cols : pattern.out_features / pattern.block_rows;
        lines.ptr += group * count;
        pattern.nnz = lines.ptr[count] - lines.ptr[0];
        const int64_t token = p_.offsets[group];
        problem.offsets = nullptr;
        problem.tokens = tokens_of(group);
        move(problem.x, token, p_.x_dtype());
        move(problem.y, token, p_.y_dtype());
        move(problem.residual, token, p_.result_dtype);
        if (is_quantized(p_.input_dtype)) {
            problem.x_scales += token;
            problem.values.scales += group * pattern.out_features;
        }
        if (p_.bias != nullptr)
            problem.bias = offset(p_.bias, group * pattern.out_features * element_size(p_.result_dtype));
        return problem;
    }

    // Enough for a group of at most so many tokens.
    int64_t bytes_for(int64_t tokens, const Device& device) const {
        Problem problem = p_;
        problem.pattern.out_features = p_.pattern.group_out_features();
        problem.pattern.groups = 1;
        problem.offsets = nullptr;
        problem.tokens = tokens;
        if (p_.op == Op::sdd_tn) return most_sdd_workspace_size(steps_, problem, device);
        const auto bytes = static_cast<int64_t>(dds_workspace_size(steps_, problem, device));
        problem.tokens = std::min<int64_t>(tokens, steps_.decode_tokens);
        if (!suits_decode(steps_, problem)) return bytes;
        return std::max(bytes, static_cast<int64_t>(decode_workspace_size(steps_, problem, device)));
    }

    void advise() const {
        if (p_.op == Op::sdd_tn) return advise_huge_pages(p_.values.data, p_.values.bytes(p_.pattern));
        const Matrix& output = p_.output();
        if (output.ld == p_.features())
            advise_huge_pages(output.data, p_.tokens * p_.features() * element_size(p_.result_dtype));
    }

    const Steps& steps_;
    const Finish finish_;
    const Problem& p_;
    const Device team_, alone_;  // alone: as if there was one processor
    const int64_t most_alone_;   // tokens of a group that one thread computes
    const int64_t team_bytes_, alone_bytes_;
};

}  // namespace

size_t groups_workspace_size(const Steps& steps, const Problem& problem, const Device& device) {
    return Groups(steps, steps.finish, problem, device).workspace_size();
}

void groups(const Steps& steps, Finish finish, const Problem& problem, const Device& device,
            void* workspace) {
    Groups(steps, finish, problem, device).run(workspace);
}

}  // namespace ts::cpu
