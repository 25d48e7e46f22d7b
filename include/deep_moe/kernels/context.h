// What every role of a CTA needs to find: parameters, its own and its peers' buffer fields, shared memory, barriers.
#pragma once

#include "deep_moe/hw/hw.h"
#include "deep_moe/layout/params.h"
#include "deep_moe/layout/smem.h"
#include "deep_moe/pipe/trace.h"
#include "deep_moe/sched/decode_plan.h"

namespace deep_moe {

template <BufferField kField>
struct BufferFieldType;
#define DM_FIELD_TYPE(field, type)               \
    template <>                                  \
    struct BufferFieldType<BufferField::field> { \
        using Type = type;                       \
    };
DM_FIELD_TYPE(Header, BufferHeader)
DM_FIELD_TYPE(CountFlags, u64)
DM_FIELD_TYPE(DoneFlags, u64)
DM_FIELD_TYPE(SendCounts, u32)
DM_FIELD_TYPE(RecvCounts, u32)
DM_FIELD_TYPE(SourceLists, u32)
DM_FIELD_TYPE(RowsArrived, u32)
DM_FIELD_TYPE(L1Done, u32)
DM_FIELD_TYPE(L2Done, u32)
DM_FIELD_TYPE(X, u8)
DM_FIELD_TYPE(XSf, float)
DM_FIELD_TYPE(TopkIdx, i32)
DM_FIELD_TYPE(TopkWeights, float)
DM_FIELD_TYPE(L1Pool, u8)
DM_FIELD_TYPE(L1PoolSf, float)
DM_FIELD_TYPE(RowMeta, RowMeta)
DM_FIELD_TYPE(L2Pool, u8)
DM_FIELD_TYPE(L2PoolSf, float)
DM_FIELD_TYPE(CombineSlots, u16)
DM_FIELD_TYPE(DecodedChunks, u64)
DM_FIELD_TYPE(DecodedWeights, u8)
#undef DM_FIELD_TYPE

template <MegaMoeConfig kConfig, BufferField kField>
DM_DEVICE auto* buffer_field(u8* base) {
    constexpr u64 kOffset = buffer_offset(kConfig, kField);
    return reinterpret_cast<typename BufferFieldType<kField>::Type*>(base + kOffset);
}

template <MegaMoeConfig kConfig>
struct Context {
    static constexpr u32 kStages = num_stages(kConfig);
    static constexpr u32 kScaleTiles = num_scale_tiles(kConfig, kStages);
    DM_DEVICE static constexpr BarrierLayout barriers() { return BarrierLayout{kStages}; }
    static_assert(config_error(kConfig) == nullptr && kStages >= 2);

    const MegaMoeParams& params;
    const MegaMoeTensorMaps& maps;
    u8* smem;
    [[no_unique_address]] Tracer<kConfig> trace;

    DM_DEVICE Context(const MegaMoeParams& p, const MegaMoeTensorMaps& m)
        : params(p), maps(m), smem(hw::shared_memory()), trace(p) {}

    template <BufferField kField>
    DM_DEVICE auto* own() const {
        return buffer_field<kConfig, kField>(params.peers[params.rank]);
    }
    template <BufferField kField>
    DM_DEVICE auto* peer(u32 rank) const {
        return buffer_field<kConfig, kField>(params.peers[rank]);
    }
    template <SmemField kField, typename T>
    DM_DEVICE T* shared() const {
        constexpr u32 kOffset = smem_offset(kConfig, kField);
        return reinterpret_cast<T*>(smem + kOffset);
    }
    // Rows that a local expert receives from the sources 0..source.
    DM_DEVICE u32* recv_rows(u32 source, u32 expert) const {
        return shared<SmemField::RecvRows, u32>() + source * kConfig.experts_per_rank() + expert;
    }
    // From all sources. After counts_ready.
    DM_DEVICE u32 expert_rows(u32 expert) const { return hw::load_shared(recv_rows(kConfig.num_ranks - 1, expert)); }
    // Local experts that have received rows, ascending. After counts_ready.
    DM_DEVICE u32 num_touched() const { return hw::load_shared(shared<SmemField::State, u32>() + 3); }
    // Row blocks of all of them. After counts_ready.
    DM_DEVICE u32 num_blocks() const { return hw::load_shared(shared<SmemField::State, u32>() + 4); }
    // After counts_ready.
    DM_DEVICE DecodePlan decode_plan() const {
        return deep_moe::decode_plan(kConfig, hw::grid_dim(), num_touched(), num_blocks());
    }
    DM_DEVICE u32 touched_expert(u32 i) const { return hw::load_shared(shared<SmemField::Touched, u16>() + i); }
    // [K blocks][2] of the tile whose place in the ring of kScaleTiles is `slot`.
    DM_DEVICE float* weight_scales(u32 slot) const {
        return shared<SmemField::SfB, float>() + slot * scale_tile_floats(kConfig);
    }
    // Of a tile's weight rows (layout/weights.h).
    DM_DEVICE const float* tile_biases(const TileTask& task) const {
        const float* biases = task.kind == TaskKind::L1 ? params.l1_biases : params.l2_biases;
        return biases + task.expert * bias_floats(weight_tiles(task.kind)) + task.n_tile * tile_weight_rows(task.kind);
    }
    DM_DEVICE u64* barrier(u32 index) const { return shared<SmemField::Barriers, u64>() + index; }
    DM_DEVICE const TensorMap* map(MapIndex index) const { return &maps.maps[u32(index)]; }

    static DM_DEVICE u32 k_blocks(TaskKind kind) {
        return kind == TaskKind::L1 ? kConfig.l1_k_blocks() : kConfig.l2_k_blocks();
    }
    // Of a pipeline stage, and the stages of a tile.
    static DM_DEVICE u32 stage_k_blocks(TaskKind kind) {
        return kind == TaskKind::L1 ? 1 : kConfig.l2_stage_k_blocks();
    }
    static DM_DEVICE u32 k_steps(TaskKind kind) { return ceil_div(k_blocks(kind), stage_k_blocks(kind)); }
    static DM_DEVICE u32 tile_weight_rows(TaskKind kind) {
        return kind == TaskKind::L1 ? kBlockN : kConfig.l2_block_n();
    }
    static DM_DEVICE u32 weight_tiles(TaskKind kind) {
        return kind == TaskKind::L1 ? kConfig.l1_weight_tiles() : kConfig.l2_weight_tiles();
    }

    // Epoch of this launch, read once before the roles part.
    DM_DEVICE u32 epoch() const { return hw::load_shared(shared<SmemField::State, u32>() + 1); }
    // Tokens of this rank.
    DM_DEVICE u32 num_tokens() const { return hw::load_shared(shared<SmemField::State, u32>() + 2); }
    // Pairs of them and a slot, with an expert or without.
    DM_DEVICE u32 num_entries() const { return num_tokens() * kConfig.num_topk; }
    // Set when a wait on another CTA or rank has failed: no role of this CTA may write results from then on.
    DM_DEVICE bool aborted() const { return hw::atomic_add_shared(shared<SmemField::State, u32>(), 0) != 0; }
    // The same for a whole warp, which looks once.
    DM_DEVICE bool warp_aborted() const { return hw::ballot(hw::lane_idx() == 0 && aborted()) != 0; }
    DM_DEVICE void set_aborted() const { hw::atomic_add_shared(shared<SmemField::State, u32>(), 1); }

    // This launch's bank of a per-block counter (RowsArrived, L1Done, L2Done).
    template <BufferField kField>
    DM_DEVICE u32* block_counters() const {
        return own<kField>() + (epoch() & 1) * kConfig.max_blocks();
    }

    // This launch's bank of the routing counts.
    DM_DEVICE u32* send_counts() const { return own<BufferField::SendCounts>() + (epoch() & 1) * kConfig.num_experts; }

    // How many places of the tile order CTAs have asked for, beyond the first one of each.
    DM_DEVICE u32* places_taken() const { return own<BufferField::Header>()->places_taken + (epoch() & 1); }

    // One thread, before sync_block(): this part reads no memory that earlier kernels use.
    DM_DEVICE void init_barriers() const {
        for (u32 i = 0; i < kStages; ++i) {
            // LoadA, and LoadB or the decode warps
            hw::mbarrier_init(barrier(barriers().full(i)), kConfig.has_decode_warps() ? 1 + kWarpsTogether : 2);
            hw::mbarrier_init(barrier(barriers().empty(i)), kConfig.math_warps());
        }
        for (u32 i = 0; i < kTaskDepth; ++i) {
            hw::mbarrier_init(barrier(barriers().task_full(i)), 1);
            hw::mbarrier_init(barrier(barriers().task_empty(i)), 1 + kConfig.math_warps());  // LoadA and math
        }
        for (u32 i = 0; i < kNumDispatchWarps * kMaxRowBuffers; ++i)
            hw::mbarrier_init(barrier(barriers().row(0, i)), 1);
        hw::mbarrier_init(barrier(barriers().counts_ready()), 1);
        hw::mbarrier_init(barrier(barriers().math()), kConfig.math_warps());
        if constexpr (kConfig.decodes_ahead())
            for (u32 i = 0; i < kSlotsGiven; ++i) {
                hw::mbarrier_init(barrier(barriers().slot_given(i)), 1);
                hw::mbarrier_init(barrier(barriers().stored(i)), kConfig.math_warps());
            }
        if constexpr (kConfig.has_decode_warps())
            for (u32 i = 0; i < kPackedStages; ++i) {
                hw::mbarrier_init(barrier(barriers().packed_full(i)), 1);
                hw::mbarrier_init(barrier(barriers().packed_empty(i)), kWarpsTogether);
            }
        hw::fence_mbarrier_init();
    }
    // One thread, before sync_block().
    DM_DEVICE void init_state() const {
        const BufferHeader* header = own<BufferField::Header>();
        const i32 staged = hw::load(&header->num_tokens);
        u32* state = shared<SmemField::State, u32>();
        // What a launch that gave up has left behind is not fit to be worked with.
        hw::store_shared(state, u32(hw::load_relaxed<hw::Scope::Sys>(&header->abort) != 0));
        hw::store_shared(state + 1, hw::load(&header->epoch) + 1);
        hw::store_shared(state + 2, min_of(u32(max_of(staged, 0)), kConfig.max_tokens_per_rank));
        if constexpr (kConfig.has_decode_warps()) hw::store_shared(state + 5, ~0u);
    }
};

// For the order of tiles.
template <MegaMoeConfig kConfig>
struct TouchedExperts {
    const Context<kConfig>& ctx;

    DM_DEVICE u32 count() const { return ctx.num_touched(); }
    DM_DEVICE u32 id(u32 i) const { return ctx.touched_expert(i); }
    DM_DEVICE u32 rows(u32 i) const { return ctx.expert_rows(id(i)); }
};

}  // namespace deep_moe
