// The readers' side of the ring of decoded weights (sched/decode_plan.h). LoadB waits for chunks and loads them; LoadA, which
// has more time, tells their decoders when they have been read.
#pragma once

#include "deep_moe/comm/wait.h"
#include "deep_moe/pipe/ring.h"

namespace deep_moe {

// LoadB: where a tile's weights lie.
template <MegaMoeConfig kConfig>
class DecodedWeights {
public:
    DM_DEVICE explicit DecodedWeights(const DecodePlan& plan) : plan_(plan) {}

    DM_DEVICE void begin(u32 weight_number) { number_ = weight_number, first_slot_ = plan_.first_slot(weight_number); }

    // Before a K block of the tile is loaded: it has been decoded, if the launch has not been abandoned.
    DM_DEVICE void wait(const Context<kConfig>& ctx, const TileTask& task, u32 kb) const {
        if (kb % (kReadTogether * kChunkBlocks) != 0) return;
        const u32 last = min_of(kb / kChunkBlocks + kReadTogether, chunks_of(ctx.k_blocks(task.kind))) - 1;
        const u32 slot = slot_of(last);
        const u64 wanted = chunk_word(kConfig, ctx.epoch(), number_, last, 0);
        const u64* word = ctx.template own<BufferField::DecodedChunks>() + slot;
        if (!holds_chunk(hw::load_acquire<hw::Scope::Gpu>(word), wanted)) {
            ctx.trace.lap(TraceKind::Load, task);
            if (!wait_word<hw::Scope::Gpu>(ctx, WaitSite::DecodedChunk, slot, word,
                                           [wanted](u64 seen) { return holds_chunk(seen, wanted); }))
                ctx.set_aborted();
            ctx.trace.lap(TraceKind::WaitWeights, task);
        }
        hw::fence_proxy_async();
    }

    DM_DEVICE const u8* block(const Context<kConfig>& ctx, u32 kb) const {
        return ctx.template own<BufferField::DecodedWeights>() + u64(slot_of(kb / kChunkBlocks)) * kChunkBytes +
               kb % kChunkBlocks * kWeightBlockBytes;
    }

private:
    DM_DEVICE u32 slot_of(u32 chunk) const { return first_slot_ + chunk % plan_.depth; }

    const DecodePlan plan_;
    u32 number_ = 0, first_slot_ = 0;
};

// LoadA: chunks that have been loaded and not yet told of, of this tile and the one before it.
template <MegaMoeConfig kConfig>
class ChunksRead {
    using Stage = RingPosition<Context<kConfig>::kStages>;
    static constexpr u32 kStages = Context<kConfig>::kStages;
    // So that it tells of a group before it loads the one after the next.
    static_assert(!kConfig.decodes_ahead() || kStages <= kReadTogether * kChunkBlocks);

public:
    // Turns to a tile. `stage`: of its first K block.
    DM_DEVICE void begin(const Context<kConfig>& ctx, u32 first_slot, u32 k_blocks, const Stage& stage) {
        finish_before(ctx, stage, current_.k_blocks);
        before_ = current_;
        current_ = {first_slot, k_blocks, 0};
    }

    // The stage of a K block was free: what had been loaded kStages before it has been multiplied.
    DM_DEVICE void loaded(const Context<kConfig>& ctx, u32 kb) {
        tell(ctx, before_, before_.k_blocks + kb + 1);
        tell(ctx, current_, kb + 1);
    }

    // Before this CTA waits for others, with so many K blocks of the tile loaded: as those others may wait for the tile
    // before it to be read. `stage`: the next one.
    DM_DEVICE void finish_before(const Context<kConfig>& ctx, Stage stage, u32 k_blocks) {
        for (; !before_.ended(); stage.advance()) {
            wait_barrier(ctx, ctx.barriers().empty(stage.slot), stage.empty_parity());
            tell(ctx, before_, before_.k_blocks + ++k_blocks);
        }
    }

    // The same behind a tile, for it and the one before it.
    DM_DEVICE void finish(const Context<kConfig>& ctx, const Stage& stage) {
        begin(ctx, 0, 0, stage);
        finish_before(ctx, stage, 0);
    }

private:
    struct Tile {
        u32 first_slot, k_blocks;
        u32 told;  // chunks

        DM_DEVICE bool ended() const { return told == chunks_of(k_blocks); }
    };

    // Of the tile and what was loaded behind it so many K blocks have been loaded, and all but kStages read.
    DM_DEVICE void tell(const Context<kConfig>& ctx, Tile& tile, u32 k_blocks) {
        while (!tile.ended()) {
            const u32 read = min_of(tile.told + kReadTogether, chunks_of(tile.k_blocks));
            if (min_of(read * kChunkBlocks, tile.k_blocks) + kStages > k_blocks) break;
            const u32 depth = ctx.decode_plan().depth;
            for (; tile.told < read; ++tile.told)
                hw::add_after_loads_gpu(
                    ctx.template own<BufferField::DecodedChunks>() + tile.first_slot + tile.told % depth, ~u64(0));
        }
    }

    Tile before_{}, current_{};
};

}  // namespace deep_moe
