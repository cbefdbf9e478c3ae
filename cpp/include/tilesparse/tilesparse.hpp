// TileSparse for C++17: owners, typed spans and exceptions over the C interface. docs/cpp-api.md shows whole
// programs, tilesparse.h says what products compute and what their operands must be.
//
//     const auto pattern = tilesparse::Pattern::from_mask({1, 1, 0, 1}, {64, 64}, {32, 32});
//     tilesparse::Product product(tilesparse::Op::dds_nt, pattern, tokens);
//     product.x(x).values(values).bias(bias).y(y).run();  // std::vector<float>, on the CPU
//
// This header and those it includes need no CUDA header and no library but the C library. Memory of a device
// is allocated and filled by a class of the caller's, see Memory in buffer.hpp.
//
// Rules that hold for everything here:
//  - What fails throws an Error, of one class per cause, whose text names the argument, its value and what is
//    allowed. Nothing has been written then.
//  - A Product refers to its pattern and operands and owns none of them: they live until after its last call.
//  - Different objects may be used by different threads; one object by one thread at a time.
//  - Nothing allocates device memory but the constructors of Buffer, DevicePattern and Plan. Nothing waits
//    for a device unless the caller's Memory does.
#ifndef TILESPARSE_TILESPARSE_HPP_
#define TILESPARSE_TILESPARSE_HPP_

#include <tilesparse/tilesparse.h>
#include <tilesparse/buffer.hpp>
#include <tilesparse/compress.hpp>
#include <tilesparse/error.hpp>
#include <tilesparse/kernels.hpp>
#include <tilesparse/pattern.hpp>
#include <tilesparse/plan.hpp>
#include <tilesparse/product.hpp>
#include <tilesparse/span.hpp>
#include <tilesparse/types.hpp>

#endif  // TILESPARSE_TILESPARSE_HPP_
