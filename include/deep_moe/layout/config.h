// MegaMoeConfig: the JIT key, the kernel's only template argument and the host's plan, in one struct.
//
// Every size in this project (buffer fields, shared memory, tensor maps, trip counts) is a constexpr
// function of it, in this folder. A size written anywhere else is a bug.
#pragma once

#include "deep_moe/base/common.h"

namespace deep_moe {

enum class MmaType : u32 { Fp8xFp8 = 0, Fp8xMxfp4 = 1 };    // activations x weights
enum class Activation : u32 { SwiGLU = 0, SwiGLUOai = 1 };  // epi/activation.h

constexpr u32 kMaxRanks = 72;
constexpr u32 kMaxExperts = 1024;
constexpr u32 kMaxTopk = 16;
constexpr u32 kBlockK = 128;            // bytes (e4m3 elements) of K per pipeline stage = one scale group
constexpr u32 kBlockN = 256;            // weight rows of a tile; an L1 tile is 128 gate and 128 up rows
constexpr u32 kScaleGroup = 128;        // channels that share an activation scale, rows and columns of a weight scale
constexpr u32 kMxfp4Group = 32;         // weights of a row that share an exponent in MXFP4
constexpr u32 kWarpgroupRows = 64;      // that a warpgroup multiplies at a time
constexpr u32 kSwappedBlockM = 8;       // the narrowest N of a wgmma
constexpr u32 kDecodedBlockM = 128;     // rows that are multiplied with MXFP4 weights as with FP8 ones, once decoded
constexpr u32 kMaxDirectRows = 32;      // of one rank alone that are not pulled (comm/direct_rows.h),
constexpr u32 kMaxDirectTokens = 4;     // of at most so many tokens
constexpr u32 kChunkBlocks = 2;         // K blocks of a chunk of decoded weights (sched/decode_plan.h),
constexpr u32 kMinDecodedSlots = 16;    // of which a decoder needs so many slots
constexpr u32 kMaxReaders = 255;        // of a chunk
constexpr u32 kMaxOrderBlocks = 65536;  // of lag and unit: their rows fit 32 bits
constexpr u32 kFp8MathWarpgroups = 2, kMxfp4MathWarpgroups = 4;
constexpr u32 kNumDispatchWarps = 2, kDecodeWarps = 4;

struct MegaMoeConfig {
    // Geometry: equal for all ranks and for all variants of one symmetric buffer.
    u32 num_ranks = 1;
    u32 num_experts = 8;  // of all ranks together
    u32 num_topk = 2;
    u32 hidden = 512;
    u32 intermediate = 256;
    u32 max_tokens_per_rank = 64;
    u32 ring_rows = 1024;   // rows of the activation pools (a ring of row blocks); multiple of 128
    u32 decoded_slots = 0;  // for decoded weights (sched/decode_plan.h); 0: no variant decodes ahead
    MmaType mma_type = MmaType::Fp8xFp8;
    Activation activation = Activation::SwiGLU;
    bool bias = false;  // experts add biases to the sums of both GEMMs

    // Variant: follows from `num_tokens_bound`, which is equal on all ranks.
    u32 bound_class = 0;        // index into the published list of bounds; travels with the counts
    u32 block_m = 64;           // rows of a tile: FP8 8, 64 or 128; MXFP4 8, 16, 24, 32, 64 or 128
    u32 lag_blocks = 4;         // how many row blocks L2 starts behind L1
    u32 unit_blocks = 4;        // consecutive row blocks of an expert that share weight tiles in L2 cache
    bool decode_ahead = false;  // of 128 rows: which CTAs decode MXFP4 weights (decodes_ahead)
    u32 trace_events = 0;       // events that a warp can record (pipe/trace.h); 0: the kernel has no trace code

    constexpr bool operator==(const MegaMoeConfig&) const = default;

    constexpr u32 experts_per_rank() const { return num_experts / num_ranks; }
    constexpr u32 l1_k_blocks() const { return ceil_div(hidden, kBlockK); }
    constexpr u32 l2_k_blocks() const { return ceil_div(intermediate, kBlockK); }
    // Of the weights (layout/weights.h).
    constexpr u32 l1_weight_tiles() const { return ceil_div(2 * intermediate, kBlockN); }
    constexpr u32 l2_weight_tiles() const { return ceil_div(hidden, kBlockN); }
    constexpr bool has_mxfp4_weights() const { return mma_type == MmaType::Fp8xMxfp4; }
    // MXFP4 weights become e4m3 in registers of the math warps; or where FP8 weights would lie in shared memory, by decode
    // warps (roles/decode.h); or once for many row blocks, by CTAs of their own (sched/decode_plan.h).
    constexpr bool decodes_in_registers() const { return has_mxfp4_weights() && block_m != kDecodedBlockM; }
    constexpr bool has_decode_warps() const { return has_mxfp4_weights() && !decodes_in_registers() && !decode_ahead; }
    constexpr bool decodes_ahead() const { return has_mxfp4_weights() && !decodes_in_registers() && decode_ahead; }
    // The weights are M of the wgmma and the rows its N: few rows then cost little, and the weights can come from registers.
    constexpr bool swaps_operands() const { return has_few_rows() || decodes_in_registers(); }
    constexpr bool has_few_rows() const { return block_m == kSwappedBlockM; }
    // Weight rows of an L2 tile. Where only the weights count, all SMs should have the same share of them: tiles are a
    // quarter as large, of one warpgroup, and a stage holds four K blocks of one. MXFP4 weights are decoded by all
    // warpgroups, each 64 rows of every tile.
    constexpr u32 l2_block_n() const { return has_few_rows() && !has_mxfp4_weights() ? kWarpgroupRows : kBlockN; }
    constexpr u32 l2_stage_k_blocks() const { return kBlockN / l2_block_n(); }
    constexpr u32 l1_n_tiles() const { return l1_weight_tiles(); }
    constexpr u32 l2_n_tiles() const { return ceil_div(hidden, l2_block_n()); }
    constexpr u32 padded_intermediate() const { return align_up(intermediate, kScaleGroup); }

    // Ranks may route everything, duplicates included, to one owner.
    constexpr u64 max_recv_rows() const { return u64(num_ranks) * max_tokens_per_rank * num_topk; }
    constexpr u32 max_blocks_of(u32 rows_per_block) const {
        return u32(max_recv_rows() / rows_per_block) + experts_per_rank();
    }
    constexpr u32 max_blocks() const { return max_blocks_of(kSwappedBlockM); }
    constexpr u32 ring_blocks() const { return ring_rows / block_m; }
    // Whether L1 and L2 units run side by side (sched/task_order.h). The scatter, which sends rows to other ranks at the
    // end of every L2 tile, is then spread over time. Where units have no more L2 tiles than L1 tiles it has time enough,
    // and CTAs that work in the same phase share more in the L2 cache.
    constexpr bool interleaves() const {
        return num_ranks > 1 && !has_few_rows() && !decodes_ahead() && l2_n_tiles() > l1_n_tiles() &&
               ring_blocks() >= lag_blocks + 2 * unit_blocks - 1;
    }
    // Dispatch warps of a CTA that pull rows. With few rows one is enough, and leaves room for one more stage.
    constexpr u32 pull_warps() const { return has_few_rows() ? 1 : kNumDispatchWarps; }
    // Whether launches with few rows load them from where they were staged (comm/direct_rows.h). They use no ring slot twice.
    constexpr bool has_direct_rows() const {
        return num_ranks == 1 && has_few_rows() && ring_blocks() >= kMaxDirectRows;
    }
    // Rows that are multiplied for a tile of so many valid ones: a short last block of an expert costs half.
    constexpr u32 tile_rows(u32 rows) const { return rows <= kWarpgroupRows ? kWarpgroupRows : block_m; }
    // Rows that are loaded for it: the block at once, or in boxes. What lies in the other rows does not matter, but it
    // would have to come from memory, while rows that have just been written are in the L2 cache. The smallest box is a
    // swizzle atom. NOTES: in 128-row kernels, which are bound by the tensor cores, eight boxes a stage cost 2 % of the
    // layer at 1024 tokens.
    constexpr u32 box_rows() const { return block_m <= 64 ? 8 : kWarpgroupRows; }
    constexpr u32 loaded_rows(u32 rows) const { return rows > block_m / 2 ? block_m : align_up(rows, box_rows()); }

    // Decoding takes more warps: instructions of one behind the wgmmas of the others.
    constexpr u32 math_warpgroups() const { return decodes_in_registers() ? kMxfp4MathWarpgroups : kFp8MathWarpgroups; }
    // That a launch needs.
    constexpr u32 min_ctas() const { return decodes_ahead() ? 2 : 1; }
    constexpr u32 math_warps() const { return math_warpgroups() * 4; }
    constexpr u32 num_threads() const { return kWarpgroupSize * (1 + math_warpgroups() + has_decode_warps()); }
    // They share what the launch allocates: 168 for each of 384 threads, 128 of 512, or 96 of 640.
    constexpr u32 math_registers() const {
        return decodes_in_registers() ? 104 : has_decode_warps() ? 208 : block_m <= 64 ? 184 : 224;
    }
    constexpr u32 aux_registers() const {
        return decodes_in_registers() ? 64 : has_decode_warps() ? 48 : block_m <= 64 ? 136 : 56;
    }
    constexpr u32 decode_registers() const { return 48; }
};

// The first rule that a configuration breaks, or nullptr. Python turns it into a ValueError.
constexpr const char* config_error(const MegaMoeConfig& c) {
    if (c.num_ranks < 1 || c.num_ranks > kMaxRanks) return "num_ranks must be in 1..72";
    if (c.num_experts < 1 || c.num_experts > kMaxExperts) return "num_experts must be in 1..1024";
    if (c.num_experts % c.num_ranks != 0) return "num_experts must be divisible by num_ranks";
    if (c.num_topk < 1 || c.num_topk > kMaxTopk) return "num_topk must be in 1..16";
    if (c.hidden < 64 || c.hidden % 64 != 0) return "hidden must be a positive multiple of 64";
    if (c.hidden > 16384) return "hidden must be at most 16384";
    if (c.intermediate < 16 || c.intermediate % 16 != 0) return "intermediate must be a positive multiple of 16";
    if (c.mma_type == MmaType::Fp8xMxfp4 && c.intermediate % kMxfp4Group != 0)
        return "intermediate must be a multiple of 32 with MXFP4 weights";
    if (c.max_tokens_per_rank < 1) return "max_tokens_per_rank must be at least 1";
    if (c.max_recv_rows() > 0x7fffffffull) return "num_ranks * max_tokens_per_rank * num_topk must be below 2^31";
    if (c.has_mxfp4_weights()) {
        if (c.block_m != 64 && c.block_m != kDecodedBlockM && (c.block_m % 8 != 0 || c.block_m < 8 || c.block_m > 32))
            return "block_m must be 8, 16, 24, 32, 64 or 128 with MXFP4 weights";
        if (c.decodes_ahead() && c.decoded_slots < kMinDecodedSlots)
            return "decoded_slots must be at least 16 to decode MXFP4 weights ahead";
    } else if (c.block_m != 8 && c.block_m != 64 && c.block_m != 128) {
        return "block_m must be 8, 64 or 128";
    }
    if (c.decode_ahead && !c.decodes_ahead()) return "decode_ahead is for MXFP4 blocks of 128 rows";
    if (c.decodes_ahead() && c.unit_blocks > kMaxReaders)
        return "unit_blocks must be at most 255 to decode MXFP4 weights ahead";
    if (c.ring_rows == 0 || c.ring_rows % 128 != 0) return "ring_rows must be a positive multiple of 128";
    if (c.lag_blocks < 1 || c.unit_blocks < 1 || c.lag_blocks > kMaxOrderBlocks || c.unit_blocks > kMaxOrderBlocks)
        return "lag_blocks and unit_blocks must be in 1..65536";
    // Order argument of the ring (sched/task_order.h): L1 is never more than lag + unit - 1 blocks ahead of L2.
    if (c.ring_blocks() < c.lag_blocks + c.unit_blocks - 1 && c.ring_blocks() < c.max_blocks_of(c.block_m))
        return "ring_rows must hold lag_blocks + unit_blocks - 1 row blocks";
    return nullptr;
}

}  // namespace deep_moe
