// Tile scheduler of the Hopper GEMMs: which tiles a CTA of the persistent grid works on, and in which order.
#pragma once

#ifndef BM
#error "BM is given by launch_config.py"
#endif

constexpr int NO_TILE = -1;

// A tile of the result: rows row .. row + rows of one expert, and a column tile. rows = 0: in a 2-CTA cluster only the other
// CTA has a tile. rows = NO_TILE: no tile is left. It is read and written as 16 bytes.
struct alignas(16) WorkTile {
    int expert, row, column_tile;
    int rows;
};

// The order of tiles, which determines what the L2 cache can serve (docs/decisions/005). An expert's row tiles come in even
// groups of about GROUP, each by all column tiles. What runs at one time is then near a square, which reads the fewest bytes, and
// the weights of an expert with few tokens come from memory once. Where rows are not gathered and the columns are a panel's,
// groups have 2 row tiles: tiles of the same rows then run side by side (docs/decisions/006).
template <bool GATHERED>
struct TileOrder {
    static constexpr unsigned GROUP = 16, PANEL_GROUP = 2, PANEL_TILES = 8;  // a panel has PANEL_TILES column tiles at most
    unsigned column_tiles;

    // The entry of row_tiles that names the expert of tile `index`.
    __device__ __forceinline__ int entry_of(int index) const { return unsigned(index) / column_tiles; }

    struct Group {
        unsigned start, height, within;  // the expert's row tiles from start on, and which of the group's tiles this is
    };
    __device__ __forceinline__ Group group_of(int index, int2 entry, int first_row, int end_row) const {
        const unsigned about = GATHERED || column_tiles > PANEL_TILES ? GROUP : PANEL_GROUP;
        const unsigned row_tiles = max((end_row - first_row + BM - 1) / BM, 1), row_tile = unsigned(entry.y - first_row) / BM;
        const unsigned groups = max((row_tiles + about / 2) / about, 1u), height = (row_tiles + groups - 1) / groups;
        const unsigned start = row_tile / height * height;
        return {start, min(height, row_tiles - start), index - (entry_of(index) - row_tile + start) * column_tiles};
    }

    // Tile `index`. entry: of row_tiles, (expert, first row). first_row, end_row: the expert's rows.
    __device__ __forceinline__ WorkTile tile(int index, int2 entry, int first_row, int end_row) const {
        const Group group = group_of(index, entry, first_row, end_row);
        const int row = first_row + static_cast<int>(group.start + group.within % group.height) * BM;
        return {entry.x, row, static_cast<int>(group.within / group.height), min(BM, end_row - row)};
    }

    // Whether tile index ^ 1 has the same expert and columns. It says no where the two tiles are in different groups.
    __device__ __forceinline__ bool shares_columns(int index, int2 entry, int first_row, int end_row) const {
        const Group group = group_of(index, entry, first_row, end_row);
        return (group.within + 1 - 2 * (index & 1)) / group.height == group.within / group.height;
    }
};

// The tiles of one CTA. The static schedule gives it blockIdx.x and every gridDim.x-th tile from there on. The dynamic schedule
// gives it its first STATIC_TILES tiles likewise and takes the index of each further tile from a counter. A cluster of CTAS = 2
// has tiles 2 i and 2 i + 1 at a time. What a tile needs from memory is loaded while the tiles before it are worked on: at the
// tile's start it would cost three dependent loads.
template <class Order, int CTAS>
struct TileScheduler {
    static constexpr int STATIC_TILES = 3;  // this tile, the next tile, and the tile after it
    const Order order;
    const int2* const row_tiles;
    const int* const expert_token_offsets;
    const int tiles;
    int next_index, index_after;
    WorkTile current;
    bool multicast = false;        // the other CTA's tile has the same expert and columns
    int2 next_entry, entry_after;  // (expert, first row)
    int next_first_row, next_end_row;

    // list: dispatch's row_tiles, (T + 1, 2) int32, whose first entry is (count, BM). tiles: of all rows and columns.
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
    // The index of the tile after the known ones, by the static schedule.
    __device__ __forceinline__ int static_index() const { return index_after + static_cast<int>(gridDim.x); }
    // By the dynamic schedule, for all CTAs of the cluster; by the static one without a counter. The counter is 0 at launch.
    // CTAs with the static schedule drift apart by whole tiles; the counter keeps those together that read the same weights.
    __device__ __forceinline__ int take_index(int* counter) const {
        const bool dynamic = counter && index_after < tiles;
        return dynamic ? STATIC_TILES * static_cast<int>(gridDim.x) + atomicAdd(counter, CTAS) : static_index();
    }
    // At a tile's start: loads what next() needs.
    __device__ __forceinline__ void prefetch() {
        next_entry = entry_after;
        next_first_row = expert_token_offsets[next_entry.x], next_end_row = expert_token_offsets[next_entry.x + 1];
        entry_after = entry_at(index_after);
    }
    // At a tile's end, with what next() has returned and the index of the tile after the next one.
    __device__ __forceinline__ void advance(const WorkTile& to, int taken_index) {
        current = to;
        if constexpr (CTAS == 2)
            multicast = (next_index | 1) < tiles && order.shares_columns(next_index, next_entry, next_first_row, next_end_row);
        next_index = index_after, index_after = taken_index;
    }
};
