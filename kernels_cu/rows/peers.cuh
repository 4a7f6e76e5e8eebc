// Memory of the P GPUs (ranks) of a host, which all of them map.
#pragma once
#include "common.cuh"

// peers: (P,) addresses of the ranks' buffers. offset: bytes from there.
template <class T>
__device__ __forceinline__ T* at_peer(const unsigned long long* peers, int peer, int64 offset) {
    return reinterpret_cast<T*>(peers[peer] + offset);
}
