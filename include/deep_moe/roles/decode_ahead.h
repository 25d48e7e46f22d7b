// A CTA that decodes weights for the others (sched/decode_plan.h). All walk the same chunks: LoadB's thread loads packed
// ones, to where weights would be; the math warps decode them, each 32 rows of every K block, to where rows would be, and
// from there by bulk copies to the ring; LoadA's thread gives them slots and announces what they have stored.
#pragma once

#include "deep_moe/mma/mxfp4.h"
#include "deep_moe/mma/promote.h"
#include "deep_moe/pipe/stages.h"

namespace deep_moe {

// The chunks of this CTA, in its order.
template <MegaMoeConfig kConfig>
class DecodeStream {
public:
    DM_DEVICE explicit DecodeStream(const Context<kConfig>& ctx)
        : ctx_(ctx),
          plan_(ctx.decode_plan()),
          order_(kConfig, TouchedExperts<kConfig>{ctx}, plan_.unit_blocks),
          number_(hw::block_idx() - plan_.workers),
          tile_(order_.weight_tile(number_)) {}

    DM_DEVICE bool ended() const { return tile_.kind == TaskKind::End; }
    DM_DEVICE void advance() {
        if (++chunk_ < chunks_of(k_blocks())) return;
        chunk_ = 0;
        number_ += plan_.decoders;
        tile_ = order_.weight_tile(number_);
    }

    DM_DEVICE u32 number() const { return number_; }
    DM_DEVICE bool is_first_of_tile() const { return chunk_ == 0; }
    DM_DEVICE u32 slot() const { return plan_.first_slot(number_) + chunk_ % plan_.depth; }
    DM_DEVICE u64 word() const { return chunk_word(kConfig, ctx_.epoch(), number_, chunk_, tile_.readers); }
    // K blocks of the chunk.
    DM_DEVICE u32 blocks() const { return ended() ? 0 : min_of(kChunkBlocks, k_blocks() - chunk_ * kChunkBlocks); }
    // Their codes and exponents.
    DM_DEVICE const u8* packed() const {
        const u64 tile = u64(tile_.expert) * ctx_.weight_tiles(tile_.kind) + tile_.n_tile;
        return (tile_.kind == TaskKind::L1 ? ctx_.params.l1_weights : ctx_.params.l2_weights) +
               (tile * k_blocks() + chunk_ * kChunkBlocks) * weight_block_bytes(kConfig.mma_type);
    }

private:
    DM_DEVICE u32 k_blocks() const { return ctx_.k_blocks(tile_.kind); }

    const Context<kConfig>& ctx_;
    const DecodePlan plan_;
    TaskOrder<TouchedExperts<kConfig>> order_;
    u32 number_;
    WeightTile tile_;
    u32 chunk_ = 0;
};

template <MegaMoeConfig kConfig>
struct DecodeAheadRole {
    // LoadB.
    static DM_DEVICE void load(const Context<kConfig>& ctx) {
        Packed stage;
        for (DecodeStream<kConfig> chunk(ctx); !chunk.ended(); chunk.advance(), stage.advance()) {
            wait_barrier(ctx, ctx.barriers().empty(stage.slot), stage.empty_parity());
            u64* full = ctx.barrier(ctx.barriers().full(stage.slot));
            hw::mbarrier_arrive_expect_tx(full, chunk.blocks() * kPackedBytes);
            hw::bulk_load(packed(ctx, stage), chunk.packed(), chunk.blocks() * kPackedBytes, full);
            hw::mbarrier_arrive(full);  // in place of LoadA
        }
    }

    // LoadA. Slots are given ahead, but a slot that is not free is not waited for while there is a chunk to be announced:
    // the slot's readers may wait for that one.
    static DM_DEVICE void announce(const Context<kConfig>& ctx) {
        Given given, stored;
        u64* words = ctx.template own<BufferField::DecodedChunks>();
        u64 *slots[kSlotsGiven] = {}, contents[kSlotsGiven];  // given and not announced
        u32 held = 0;
        for (DecodeStream<kConfig> chunk(ctx); held > 0 || !chunk.ended();) {
            u64* word = words + chunk.slot();
            bool gives = !chunk.ended() && held < kSlotsGiven;
        DM_UNROLL
            for (u32 i = 0; i < kSlotsGiven; ++i) gives = gives && word != slots[i];
            const auto is_free = [](u64 seen) { return readers_left(seen) == 0; };
            gives = gives && is_free(hw::load_acquire<hw::Scope::Gpu>(word));
            if (!gives && held > 0) {
                wait_barrier(ctx, ctx.barriers().stored(stored.slot), stored.full_parity());
                if (!ctx.aborted()) hw::store_release_gpu(slots[0], contents[0]);
                stored.advance(), --held;
                DM_UNROLL
                for (u32 i = 1; i < kSlotsGiven; ++i) slots[i - 1] = slots[i], contents[i - 1] = contents[i];
                slots[kSlotsGiven - 1] = nullptr;
                continue;
            }
            if (!gives && !wait_word<hw::Scope::Gpu>(ctx, WaitSite::DecodedSlot, chunk.slot(), word, is_free))
                ctx.set_aborted();
            hw::mbarrier_arrive(ctx.barrier(ctx.barriers().slot_given(given.slot)));
            DM_UNROLL
            for (u32 i = 0; i < kSlotsGiven; ++i)
                if (i == held) slots[i] = word, contents[i] = chunk.word();
            chunk.advance(), given.advance(), ++held;
        }
    }

    // All math warps.
    static DM_DEVICE void run(const Context<kConfig>& ctx, u32 math_warp) {
        Packed stage;
        Given given, before;
        u32 copies = 0;
        bool unfinished = false;  // the chunk before
        for (DecodeStream<kConfig> chunk(ctx); !chunk.ended(); stage.advance(), given.advance()) {
            const bool writes = !ctx.warp_aborted();
            const u64 part = math_warp * kPartBytes;
            u8* slot = ctx.template own<BufferField::DecodedWeights>() + u64(chunk.slot()) * kChunkBytes + part;
            wait_barrier(ctx, ctx.barriers().full(stage.slot), stage.full_parity());
            DM_UNROLL
            for (u32 b = 0; b < kChunkBlocks; ++b, ++copies) {
                u8* rows = decoded(ctx, copies % kBuffers) + part;
                if (hw::elect_one()) hw::bulk_wait<kBuffers - 1>();
                hw::sync_warp();
                if (b < chunk.blocks()) decode(packed(ctx, stage) + b * kPackedBytes, math_warp, rows);
                hw::fence_proxy_async_shared();
                if (b == 0) {
                    // What the slot waits for may be the chunk before.
                    const u32 slot_given = ctx.barriers().slot_given(given.slot);
                    const bool is_given =
                        hw::all_lanes(hw::mbarrier_test_wait(ctx.barrier(slot_given), given.full_parity()));
                    if (!is_given && unfinished) finish<0>(ctx, before), unfinished = false;
                    wait_barrier(ctx, slot_given, given.full_parity());
                }
                hw::sync_warp();
                if (hw::elect_one()) {
                    if (b < chunk.blocks() && writes) hw::bulk_store(slot + b * kWeightBlockBytes, rows, kPartBytes);
                    hw::bulk_commit();  // behind a tile's last block an empty group, so that groups can be counted
                }
            }
            arrive(ctx, ctx.barriers().empty(stage.slot));
            if (unfinished) finish<kChunkBlocks>(ctx, before);
            unfinished = true;
            const u32 number = chunk.number();
            chunk.advance();
            if (chunk.is_first_of_tile()) ctx.trace.lap(TraceKind::Decode, number);
        }
        if (unfinished) finish<0>(ctx, before);
    }

private:
    static constexpr u32 kPackedBytes = weight_block_bytes(kConfig.mma_type), kPackedChunkBytes = kChunkBlocks * kPackedBytes;
    // Packed chunks and decoded K blocks that there is room for.
    static constexpr u32 kChunks = min_of(Context<kConfig>::kStages,
                                          u32(smem_field_spec(kConfig, SmemField::B).bytes()) / kPackedChunkBytes);
    static constexpr u32 kBuffers = u32(smem_field_spec(kConfig, SmemField::A).bytes()) / kWeightBlockBytes;
    static_assert(kChunks >= 2 && kBuffers >= 1 && kSlotsGiven < kMinDepth);
    using Packed = RingPosition<kChunks>;
    using Given = RingPosition<kSlotsGiven>;
    static constexpr u32 kGroups = kBlockN / 16 / kConfig.math_warps();  // of 16 rows, that a warp decodes
    static constexpr u32 kPartBytes = kGroups * 16 * kBlockK;

    static DM_DEVICE u8* packed(const Context<kConfig>& ctx, const Packed& stage) {
        return ctx.template shared<SmemField::B, u8>() + stage.slot * kPackedChunkBytes;
    }
    static DM_DEVICE u8* decoded(const Context<kConfig>& ctx, u32 buffer) {
        return ctx.template shared<SmemField::A, u8>() + buffer * kWeightBlockBytes;
    }

    static DM_DEVICE void arrive(const Context<kConfig>& ctx, u32 barrier) {
        hw::sync_warp();
        if (hw::lane_idx() == 0) hw::mbarrier_arrive(ctx.barrier(barrier));
    }
    // The warp has stored the chunk, as of its blocks at most kPending are under way.
    template <u32 kPending>
    static DM_DEVICE void finish(const Context<kConfig>& ctx, Given& chunk) {
        if (hw::elect_one()) hw::bulk_wait<kPending>();
        arrive(ctx, ctx.barriers().stored(chunk.slot));
        chunk.advance();
    }

    // A K block of this warp's rows.
    static DM_DEVICE void decode(const u8* packed, u32 math_warp, u8* rows) {
        Mxfp4Codes codes[kGroups];
        bool normal = true;
        DM_UNROLL
        for (u32 i = 0; i < kGroups; ++i) {
            const u32 group = math_warp * kGroups + i;
            codes[i] = load_mxfp4(packed + group / 4 * kMxfp4PieceBytes, group % 4, hw::lane_idx());
            normal = normal && mxfp4_all_normal(codes[i].exponents);
        }
        // One branch for all groups, so that their instructions mix: a decoder has few warps.
        if (hw::all_lanes(normal))
            decode(codes, true, rows);
        else
            decode(codes, false, rows);
    }
    static DM_DEVICE void decode(const Mxfp4Codes (&codes)[kGroups], bool all_normal, u8* rows) {
        u32 a[kGroups][kBlockK / kMmaK][4];
        DM_UNROLL
        for (u32 i = 0; i < kGroups; ++i) decode_mxfp4(codes[i], all_normal, a[i]);
        DM_UNROLL
        for (u32 i = 0; i < kGroups; ++i)
            store_decoded(rows + i * 16 * kBlockK + decoded_byte_of(hw::lane_idx()), hw::lane_idx(), a[i]);
    }
};

}  // namespace deep_moe
