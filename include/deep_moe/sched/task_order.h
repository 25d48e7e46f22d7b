// The order in which a rank's tiles are computed: pure logic, no hardware.
//
// The rows that a local expert received are cut into row blocks of block_m rows; blocks are numbered through all
// experts in ascending order. A *unit* is up to unit_blocks consecutive blocks of one expert; its tiles run with the
// row block fastest, so that CTAs working side by side share a weight tile in the L2 cache. Units of L1 and L2 form one
// sequence: L1 runs ahead until it leads by lag_blocks, then L2 units and L1 units follow each other; or, in a
// configuration that interleaves, the tiles of both units alternate. CTAs take places of the sequence one after the
// other, in ascending order, as they get ready for the next tile.
//
// No order can dead-lock: a tile waits only for tiles earlier in the sequence, and those have been taken before. L2 of a
// block comes after all L1 tiles of the block: both phases have the same units, so that a unit that L1 is ahead of has
// been left behind by it. On a ring, L1 of block b also waits for L2 of block b - ring_blocks; L1 leads by at most
// lag_blocks + unit_blocks - 1 blocks (and the L2 unit that it alternates with), and the ring holds at least that many
// (config_error, interleaves). So the earliest unfinished tile can always proceed, and every CTA reaches its tiles in
// ascending order.
#pragma once

#include "deep_moe/layout/config.h"

namespace deep_moe {

// Decode: what a CTA does before its End that has no tiles (roles/decode_ahead.h).
enum class TaskKind : u16 { L1, L2, End, Decode };

// One tile, as the scheduler publishes it to the other roles. 16 bytes.
struct alignas(16) TileTask {
    TaskKind kind;
    u16 n_tile;     // which 256 weight rows
    u16 expert;     // local
    u16 rows;       // valid rows of the block, 1..block_m
    u32 block;      // number of the row block
    u32 ring_slot;  // block % ring_blocks: where its rows are in the pools
};
static_assert(sizeof(TileTask) == 16);

// A weight tile of a unit.
struct WeightTile {
    TaskKind kind;  // End: there is none
    u32 expert, n_tile;
    u32 readers;  // tiles that need it
};

// Walks the units of one phase. Experts: the local experts in ascending order; those without rows may be left out.
// count(), and of the i-th: id(i), rows(i).
template <typename Experts>
struct UnitCursor {
    u32 expert = 0;     // as the list counts them
    u32 block = 0;      // number of the unit's first row block
    u32 rows_left = 0;  // of the expert, from the unit's first row on

    DM_HOST_DEVICE constexpr void start(const Experts& experts) {
        expert = 0;
        rows_left = experts.count() == 0 ? 0 : experts.rows(0);
        skip_empty(experts);
    }
    DM_HOST_DEVICE constexpr bool ended(const Experts& experts) const { return expert == experts.count(); }

    DM_HOST_DEVICE constexpr u32 blocks(u32 block_m, u32 unit_blocks) const {
        return min_of(ceil_div(rows_left, block_m), unit_blocks);
    }
    DM_HOST_DEVICE constexpr void advance(const Experts& experts, u32 block_m, u32 unit_blocks) {
        block += blocks(block_m, unit_blocks);
        rows_left -= min_of(rows_left, block_m * unit_blocks);
        if (rows_left == 0) {
            ++expert;
            if (expert < experts.count()) rows_left = experts.rows(expert);
            skip_empty(experts);
        }
    }

private:
    DM_HOST_DEVICE constexpr void skip_empty(const Experts& experts) {
        while (expert < experts.count() && rows_left == 0) {
            ++expert;
            if (expert < experts.count()) rows_left = experts.rows(expert);
        }
    }
};

// Walks the sequence forwards, by any number of places at a time:
// for (TileTask t = order.first(place); t.kind != TaskKind::End; t = order.next(places)).
template <typename Experts>
class TaskOrder {
public:
    DM_HOST_DEVICE constexpr TaskOrder(const MegaMoeConfig& c, const Experts& experts, u32 unit_blocks)
        : experts_(experts),
          block_m_(c.block_m),
          unit_blocks_(unit_blocks),
          lag_blocks_(c.lag_blocks),
          ring_blocks_(c.ring_blocks()),
          l1_tiles_(c.l1_n_tiles()),
          l2_tiles_(c.l2_n_tiles()),
          interleaves_(c.interleaves()) {
        l1_.start(experts_);
        l2_ = l1_;
        choose_step();
    }

    DM_HOST_DEVICE constexpr TileTask first(u32 place) { return next(place); }

    // Moves `tiles` forward and returns the tile there.
    DM_HOST_DEVICE constexpr TileTask next(u32 tiles) {
        tile_ += tiles;
        u32 l1_tiles = tiles_of_l1(), l2_tiles = tiles_of_l2();
        while (!ended_ && tile_ >= l1_tiles + l2_tiles) {
            tile_ -= l1_tiles + l2_tiles;
            next_step();
            l1_tiles = tiles_of_l1(), l2_tiles = tiles_of_l2();
        }
        if (ended_) return TileTask{TaskKind::End, 0, 0, 0, 0, 0};
        bool in_l1 = has_l1_;
        u32 tile = tile_;
        if (interleaves_ && has_l1_ && has_l2_) {
            // Both alternate as evenly as their numbers allow.
            const u64 scaled = u64(tile_) * l1_tiles, both = l1_tiles + l2_tiles;
            const u32 l1_before = u32(scaled / both);
            in_l1 = scaled % both + l1_tiles >= both;
            tile = in_l1 ? l1_before : tile_ - l1_before;
        }
        // Spelled out: a reference to one of the two cursors would put both into local memory.
        const UnitCursor<Experts> unit{in_l1 ? l1_.expert : l2_.expert, in_l1 ? l1_.block : l2_.block,
                                       in_l1 ? l1_.rows_left : l2_.rows_left};
        const u32 blocks = unit.blocks(block_m_, unit_blocks_);
        const u32 n = blocks == 1 ? tile : tile / blocks, m = tile - n * blocks;  // few rows: without a division
        const u32 block = unit.block + m;
        weight_number_ = weights_ + n;
        return TileTask{in_l1 ? TaskKind::L1 : TaskKind::L2,
                        u16(n),
                        u16(experts_.id(unit.expert)),
                        u16(min_of(unit.rows_left - m * block_m_, block_m_)),
                        block,
                        block % ring_blocks_};
    }

    // Of the weight tile that the tile returned last needs. Not of orders that interleave.
    DM_HOST_DEVICE constexpr u32 weight_number() const { return weight_number_; }

    // Moves to the unit of a weight tile, by number, which may not be before the one asked for last.
    DM_HOST_DEVICE constexpr WeightTile weight_tile(u32 number) {
        while (!ended_ && number - weights_ >= weights_of_step()) next_step();
        if (ended_) return {TaskKind::End, 0, 0, 0};
        return {has_l1_ ? TaskKind::L1 : TaskKind::L2, experts_.id(has_l1_ ? l1_.expert : l2_.expert),
                number - weights_, has_l1_ ? l1_.blocks(block_m_, unit_blocks_) : l2_.blocks(block_m_, unit_blocks_)};
    }

private:
    DM_HOST_DEVICE constexpr u32 weights_of_step() const { return has_l1_ ? l1_tiles_ : l2_tiles_; }
    DM_HOST_DEVICE constexpr void next_step() {
        weights_ += weights_of_step();
        if (has_l1_) l1_.advance(experts_, block_m_, unit_blocks_);
        if (has_l2_) l2_.advance(experts_, block_m_, unit_blocks_);
        choose_step();
    }
    DM_HOST_DEVICE constexpr u32 tiles_of_l1() const {
        return has_l1_ ? l1_.blocks(block_m_, unit_blocks_) * l1_tiles_ : 0;
    }
    DM_HOST_DEVICE constexpr u32 tiles_of_l2() const {
        return has_l2_ ? l2_.blocks(block_m_, unit_blocks_) * l2_tiles_ : 0;
    }
    DM_HOST_DEVICE constexpr void choose_step() {
        const u32 lead = l1_.block - l2_.block;
        const bool l1_left = !l1_.ended(experts_);
        has_l1_ = l1_left && lead < lag_blocks_;
        has_l2_ = !has_l1_;
        if (interleaves_ && l1_left && has_l2_) has_l1_ = lead - l2_.blocks(block_m_, unit_blocks_) < lag_blocks_;
        ended_ = l2_.ended(experts_);
    }

    Experts experts_;
    u32 block_m_, unit_blocks_, lag_blocks_, ring_blocks_, l1_tiles_, l2_tiles_;
    bool interleaves_;
    UnitCursor<Experts> l1_{}, l2_{};
    u32 tile_ = 0;
    bool has_l1_ = true, has_l2_ = false;  // what the step of the sequence that `tile_` is in has
    bool ended_ = false;
    u32 weights_ = 0;  // weight tiles of the steps before
    u32 weight_number_ = 0;
};

}  // namespace deep_moe
