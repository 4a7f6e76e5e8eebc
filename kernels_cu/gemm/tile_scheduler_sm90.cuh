// Tile scheduler of grouped_gemm_sm90.cu: which tiles a CTA of the persistent grid computes, and in which order.
#pragma once

constexpr int NO_TILE = -1;

// A tile of the result: rows `row` to `row + rows` of one expert, and a column tile. With rows = 0 this CTA has no tile, but
// the other CTA of its cluster has one. With rows = NO_TILE no tile is left. It is read and written as 16 bytes.
struct alignas(16) WorkTile {
    int expert, row, column_tile;
    int rows;
};

// The order of tiles, which determines the hit rate of the L2 cache (docs/decisions/005). An expert's row tiles are divided
// into groups of about GROUP, as equal as possible, and each group runs with all column tiles. The tiles that run at one time
// are then nearly a square, which reads the fewest bytes, and the weights of an expert with few tokens are read from memory
// once. If rows are not gathered and the result is a panel, groups have about 2 row tiles: tiles of the same rows then run at
// one time (docs/decisions/006).
template <bool GATHERED>
struct TileOrder {
    static constexpr unsigned GROUP = 16, PANEL_GROUP = 2, PANEL_TILES = 8;  // a panel has PANEL_TILES column tiles at most
    unsigned column_tiles;

    // An entry of row_tiles that names the expert of tile `index`. Its row tile may be another one of this expert.
    __device__ __forceinline__ int entry_of(int index) const { return unsigned(index) / column_tiles; }

    struct Group {
        unsigned start, height, within;  // first row tile in the expert, number of row tiles, the tile's index in the group
    };
    __device__ __forceinline__ Group group_of(int index, int2 entry, int first_row, int end_row) const {
        const unsigned about = GATHERED || column_tiles > PANEL_TILES ? GROUP : PANEL_GROUP;
        const unsigned row_tiles = max((end_row - first_row + BM - 1) / BM, 1), row_tile = unsigned(entry.y - first_row) / BM;
        const unsigned groups = max((row_tiles + about / 2) / about, 1u), height = (row_tiles + groups - 1) / groups;
        const unsigned start = row_tile / height * height;
        return {start, min(height, row_tiles - start), index - (entry_of(index) - row_tile + start) * column_tiles};
    }

    // Tile `index`. entry: (expert, first row) of row_tiles, at entry_of(index). first_row, end_row: the expert's rows.
    __device__ __forceinline__ WorkTile tile(int index, int2 entry, int first_row, int end_row) const {
        const Group group = group_of(index, entry, first_row, end_row);
        const int row = first_row + static_cast<int>(group.start + group.within % group.height) * BM;
        return {entry.x, row, static_cast<int>(group.within / group.height), min(BM, end_row - row)};
    }

    // Returns whether tile index ^ 1 has the same expert and columns, and false if the two tiles are in different groups.
    __device__ __forceinline__ bool shares_columns(int index, int2 entry, int first_row, int end_row) const {
        const Group group = group_of(index, entry, first_row, end_row);
        return (group.within + 1 - 2 * (index & 1)) / group.height == group.within / group.height;
    }
};

// The tiles of one CTA. In the static schedule the CTA computes tile blockIdx.x and every gridDim.x-th tile after it. In the
// dynamic schedule this holds for its first STATIC_TILES tiles, and a counter gives the index of each further tile. A cluster
// of CTAS = 2 has tiles 2 i and 2 i + 1 at one time. The scheduler loads the description of a tile while the CTA computes the
// tiles before it: at the tile's start it would take three dependent loads.
template <class Order, int CTAS>
struct TileScheduler {
    static constexpr int STATIC_TILES = 3;  // this tile, the next tile, and the tile after it
    const Order order;
    const int2* const row_tiles;
    const int* const expert_token_offsets;
    const int tiles;
    int next_index, index_after;
    WorkTile current;
    bool multicast = false;            // the other CTA's tile has the same expert and columns
    int2 next_entry, entry_after;      // (expert, first row)
    int next_first_row, next_end_row;  // rows of the next tile's expert

    // list: row_tiles, (T + 1, 2) int32, whose first entry is (number of row tiles, BM). tiles: row tiles times column tiles.
    __device__ __forceinline__ TileScheduler(Order order, const int* list, const int* expert_token_offsets, int tiles)
        : order(order), row_tiles(reinterpret_cast<const int2*>(list) + 1), expert_token_offsets(expert_token_offsets),
          tiles(tiles), next_index(blockIdx.x), index_after(next_index + gridDim.x), entry_after(entry_at(next_index)) {
        prefetch();
        advance(next(), static_index());
    }
    __device__ __forceinline__ int2 entry_at(int index) const {
        return index < tiles ? row_tiles[order.entry_of(index)] : make_int2(0, 0);
    }
    __device__ __forceinline__ bool valid() const { return current.rows != NO_TILE; }
    __device__ __forceinline__ WorkTile next() const {
        if (next_index >= tiles) return {0, 0, 0, CTAS == 2 && next_index & 1 && next_index == tiles ? 0 : NO_TILE};
        return order.tile(next_index, next_entry, next_first_row, next_end_row);
    }
    // The index of the tile that follows the known ones in the static schedule.
    __device__ __forceinline__ int static_index() const { return index_after + static_cast<int>(gridDim.x); }
    // The index of the tile that follows the known ones: from the counter, for all CTAs of the cluster, or without a counter in
    // the static schedule. The counter is 0 at launch. CTAs in the static schedule drift apart by whole tiles. The counter
    // keeps CTAs together that read the same weights.
    __device__ __forceinline__ int take_index(int* counter) const {
        const bool dynamic = counter && index_after < tiles;
        return dynamic ? STATIC_TILES * static_cast<int>(gridDim.x) + atomicAdd(counter, CTAS) : static_index();
    }
    // Loads what next() needs. Called at a tile's start.
    __device__ __forceinline__ void prefetch() {
        next_entry = entry_after;
        next_first_row = expert_token_offsets[next_entry.x], next_end_row = expert_token_offsets[next_entry.x + 1];
        entry_after = entry_at(index_after);
    }
    // Moves on to tile `to`, which next() has returned. taken_index: of the second tile after `to`. Called at a tile's end.
    __device__ __forceinline__ void advance(const WorkTile& to, int taken_index) {
        current = to;
        if constexpr (CTAS == 2)
            multicast = (next_index | 1) < tiles && order.shares_columns(next_index, next_entry, next_first_row, next_end_row);
        next_index = index_after, index_after = taken_index;
    }
};
