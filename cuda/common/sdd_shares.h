// How sdd kernels share out their tiles, of which those of the last round may be split over the tokens, see
// tma/sdd_schedule.cuh. For kernels, and for estimates of their time.
#pragma once

#ifdef __CUDACC__
#define TS_HOST_DEVICE __host__ __device__
#else
#define TS_HOST_DEVICE
#endif

namespace ts {

constexpr int kSddStep = 64;  // tokens

// Counts of tiles are those of a team.
struct SddShares {
    int whole;  // that are surely not split, the first ones
    int rest;   // all others
    int share;  // steps of a team's share of these
    int parts;  // of a tile that are a share each
    int left;   // steps of a tile that are left over
    int saved;  // time that splitting saves

    // `step_time`: of a step, in units of a step of 128 x 256 in 16 bits by wgmma, which takes .58 us on an
    // H200. `may_split`: whether there is memory for partial sums and a second kernel.
    TS_HOST_DEVICE SddShares(int tiles, int steps, int teams, int team_size, int step_time, bool may_split)
        : share(steps), parts(1), left(0), saved(0) {
        const int team_tiles = (tiles + team_size - 1) / team_size;
        whole = may_split ? team_tiles / teams * teams : team_tiles;
        rest = team_tiles - whole;
        if (rest > 0) divide(steps, teams, team_size, step_time);
    }

    TS_HOST_DEVICE bool is_split(int steps) const { return share < steps; }

    // Tiles of partial sums, at most.
    TS_HOST_DEVICE int partials(int teams) const { return left > 0 ? teams + rest : parts * rest; }

    // Steps in the time of which partial sums are stored.
    TS_HOST_DEVICE static constexpr int storing(int step_time) { return (2 + step_time) / step_time; }

  private:
    // Chooses the least of the estimated times. Fitted on an H200.
    TS_HOST_DEVICE void divide(int steps, int teams, int team_size, int step_time) {
        const int least = (3 + step_time) / step_time;
        const int even_share = (rest * (steps + storing(step_time)) + teams - 1) / teams;
        const int uneven = even_share < least ? least : even_share;
        if (uneven >= steps) return;
        const int count = steps / uneven, over = steps - count * uneven;
        // A few parts may be one more where teams are idle; to add many takes as long as is saved.
        const int most = count < 4 && rest * (count + 1) <= teams ? count + 1 : count;
        const int even = (steps + most - 1) / most, even_parts = (steps + even - 1) / even;
        const int even_time = even == steps ? step_time * steps
                                            : step_time * even + reduction_time(rest * even_parts, team_size);
        // Leftover work begins at any token and finds less in L2.
        const int misses = 4 + 2 * over * rest / (3 * teams);
        const int uneven_time = step_time * uneven + reduction_time(teams + rest, team_size) + misses;
        const bool is_even = even_time <= uneven_time || over == 0;
        const int gain = step_time * steps - (is_even ? even_time : uneven_time);
        if (gain <= 0) return;
        saved = gain;
        share = is_even ? even : uneven;
        parts = is_even ? even_parts : count;
        left = is_even ? 0 : over;
    }

    TS_HOST_DEVICE static int reduction_time(int partials, int team_size) {
        return 5 + partials * team_size / 16;
    }
};

}  // namespace ts

#undef TS_HOST_DEVICE
