// Reads the block-sparse layers of a checkpoint that tilesparse.save has written, as docs/checkpoints.md
// describes them. All that is read is checked; what is wrong throws an exception whose text says where and
// what.

#pragma once

#include <tilesparse/tilesparse.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "json.h"

namespace fs = std::filesystem;
using Bytes = std::vector<char>;

constexpr uint64_t kLargestJson = 16 << 20;  // bytes: many thousand layers have less

[[noreturn]] inline void fail(const std::string& text) { throw std::runtime_error(text); }

// Says in errors where something is wrong.
template <class Function>
void named(const std::string& place, const Function& function) {
    try {
        function();
    } catch (const std::exception& error) {
        fail(place + ": " + error.what());
    }
}

struct Dtype {
    std::string_view in_file;    // as safetensors names it
    std::string_view in_config;  // as configurations do
    int32_t code;                // as the library knows it; -1 for what it never multiplies
    uint64_t bytes;
};

constexpr std::array<Dtype, 9> kDtypes{{{"F64", "float64", TS_FLOAT64, 8},
                                        {"F32", "float32", TS_FLOAT32, 4},
                                        {"F16", "float16", TS_FLOAT16, 2},
                                        {"BF16", "bfloat16", TS_BFLOAT16, 2},
                                        {"I8", "int8", TS_INT8, 1},
                                        {"F8_E4M3", "float8_e4m3fn", TS_FLOAT8_E4M3FN, 1},
                                        {"U8", "int4", TS_INT4, 1},  // of two
                                        {"I32", "int32", -1, 4},
                                        {"BOOL", "bool", -1, 1}}};

inline const Dtype& dtype_of(std::string_view name, const char* key = "dtype") {
    for (const Dtype& dtype : kDtypes)
        if (dtype.in_config == name) return dtype;
    fail(std::string(key) + ": " + std::string(name) + " is not known here");
}

// Checked access to JSON.

inline const Json& member(const Json& object, std::string_view key, Json::Kind kind) {
    const Json* found = object.find(key);
    if (found == nullptr || found->kind != kind) fail(std::string(key) + ": missing, or of another kind");
    return *found;
}

inline int64_t integer(const Json& number, int64_t largest) {
    int64_t value = 0;
    const char* end = number.text.data() + number.text.size();
    const auto [stopped, error] = std::from_chars(number.text.data(), end, value);
    if (number.kind != Json::Number || error != std::errc() || stopped != end || value < 0 || value > largest)
        fail("the number must be an integer from 0 to " + std::to_string(largest));
    return value;
}

inline std::vector<int64_t> integers(const Json& object, std::string_view key, int64_t largest) {
    std::vector<int64_t> numbers;
    for (const Json& item : member(object, key, Json::Array).items) numbers.push_back(integer(item, largest));
    return numbers;
}

inline std::pair<int64_t, int64_t> two_integers(const Json& object, std::string_view key) {
    const std::vector<int64_t> numbers = integers(object, key, INT32_MAX);
    if (numbers.size() != 2) fail(std::string(key) + " must be two numbers");
    return {numbers[0], numbers[1]};
}

// Bytes of a tensor, or of more than any file has where they cannot be counted.
inline uint64_t byte_count(const std::vector<int64_t>& shape, uint64_t itemsize) {
    uint64_t bytes = itemsize;
    for (const int64_t size : shape) {
        if (size != 0 && bytes > INT64_MAX / static_cast<uint64_t>(size)) return UINT64_MAX;
        bytes *= static_cast<uint64_t>(size);
    }
    return bytes;
}

// Files.

inline Bytes read_bytes(const fs::path& path, uint64_t begin, uint64_t count) {
    std::ifstream file(path, std::ios::binary);
    Bytes bytes(count);
    file.seekg(static_cast<std::streamoff>(begin));
    if (!file.read(bytes.data(), static_cast<std::streamsize>(count))) fail("cannot be read");
    return bytes;
}

inline uint32_t crc32(const Bytes& bytes) {
    uint32_t crc = ~0u;
    for (const char byte : bytes) {
        crc ^= static_cast<unsigned char>(byte);
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return ~crc;
}

// Compares with what a checkpoint says: eight hexadecimal digits. Those that other programs write say
// nothing.
inline void check_sum(const Json* expected, const Bytes& bytes) {
    std::array<char, 9> sum{};
    std::snprintf(sum.data(), sum.size(), "%08x", static_cast<unsigned>(crc32(bytes)));
    if (expected != nullptr && expected->text != sum.data()) fail("damaged: its checksum is another one");
}

struct Stored {
    fs::path file;
    std::string dtype;
    std::vector<int64_t> shape;
    uint64_t begin = 0, bytes = 0;
    Json checksum;
};

class Checkpoint {
  public:
    explicit Checkpoint(fs::path folder) : folder_(std::move(folder)) {
        named("config.json", [this] { read_config(); });
        read_headers();
        named("config.json", [this] { check_ties(); });
    }

    // The entry of a layer in the configuration.
    const Json& layer(const std::string& name) const {
        const Json* found = member(section_, "layers", Json::Object).find(name);
        if (found == nullptr) fail("config.json does not have it");
        return *found;
    }

    bool has(const std::string& name) const { return tensors_.count(stored_as(name)) > 0; }

    // The tensor, if it is what is expected.
    Bytes read(const std::string& name, const Dtype& dtype, const std::vector<int64_t>& shape) const {
        Bytes bytes;
        named(name, [&] {
            const Stored& tensor = stored(name);
            if (tensor.dtype != dtype.in_file || tensor.shape != shape)
                fail("the tensor must have the dtype and shape that config.json says");
            bytes = read_bytes(tensor.file, tensor.begin, tensor.bytes);
            check_sum(tensor.checksum.kind == Json::Null ? nullptr : &tensor.checksum, bytes);
        });
        return bytes;
    }

  private:
    // Reads the headers of one file, or of those that the index names.
    void read_headers() {
        if (fs::exists(folder_ / "model.safetensors")) {
            named("model.safetensors", [this] { read_header("model.safetensors"); });
            return;
        }
        constexpr const char* kIndex = "model.safetensors.index.json";
        Json places;
        named(kIndex, [&] {
            places = member(read_json(kIndex), "weight_map", Json::Object);
            for (const Json& file : places.items)
                if (file.kind != Json::String || fs::path(file.text).filename() != file.text)
                    fail("weight_map must name files in this folder");
        });
        std::set<std::string> files;
        for (const Json& file : places.items) files.insert(file.text);
        for (const std::string& file : files) named(file, [&] { read_header(file); });
        for (const std::string& tensor : places.keys)
            if (tensors_.count(tensor) == 0)
                fail(std::string(kIndex) + ": " + tensor + ": in none of the files");
    }

    // A tensor of several names is stored under one of them.
    const std::string& stored_as(const std::string& name) const {
        const Json* other = ties_.find(name);
        return other == nullptr ? name : other->text;
    }

    const Stored& stored(const std::string& name) const {
        const auto found = tensors_.find(stored_as(name));
        if (found == tensors_.end()) fail("missing");
        return found->second;
    }

    // Tensors that the configuration does not list were left there by something else; other programs list
    // none.
    void check_file(const std::string& name, const Bytes& text) const {
        if (files_.kind == Json::Null) return;
        const Json* sum = files_.find(name);
        if (sum == nullptr) fail("does not belong to config.json, which lists other files");
        check_sum(sum, text);
    }

    Json read_json(const std::string& file) const {
        const uint64_t size = fs::file_size(folder_ / file);
        if (size > kLargestJson) fail("too large");
        const Bytes text = read_bytes(folder_ / file, 0, size);
        check_file(file, text);
        return JsonReader({text.data(), text.size()}).read();
    }

    void read_config() {
        const Json config = read_json("config.json");
        const Json* section = config.find("quantization_config");  // of Transformers
        const Json* method = section == nullptr ? nullptr : section->find("quant_method");
        if (method == nullptr || method->text != "tilesparse")
            section = &member(config, "tilesparse", Json::Object);
        if (integer(member(*section, "version", Json::Number), INT32_MAX) != 1)
            fail("version must be 1; a newer program is needed");
        section_ = *section;
        ties_ = texts("ties");
        files_ = texts("files");
    }

    // The object of texts that the section may have under a key.
    Json texts(const char* key) const {
        const Json* found = section_.find(key);
        if (found == nullptr || found->kind == Json::Null) return {};
        for (const Json& item : member(section_, key, Json::Object).items)
            if (item.kind != Json::String) fail(std::string(key) + " must be texts");
        return *found;
    }

    // A layer whose bias has no such place would otherwise pass for one without.
    void check_ties() const {
        for (size_t i = 0; i < ties_.keys.size(); ++i)
            if (tensors_.count(ties_.keys[i]) > 0 || tensors_.count(ties_.items[i].text) == 0)
                fail("ties: " + ties_.keys[i] + " must be another name for a stored tensor");
    }

    // A safetensors file: the length of its header in eight bytes, the header, the tensors.
    void read_header(const std::string& name) {
        const fs::path file = folder_ / name;
        const uint64_t size = fs::file_size(file);
        if (size < 8) fail("no safetensors file");
        const Bytes prefix = read_bytes(file, 0, 8);
        uint64_t length = 0;
        for (int i = 7; i >= 0; --i)
            length = length << 8 | static_cast<unsigned char>(prefix[static_cast<size_t>(i)]);
        if (length > std::min(kLargestJson, size - 8))
            fail("the header must not be longer than the file or 16 MiB");
        const Bytes text = read_bytes(file, 0, 8 + length);
        check_file(name, text);
        const Json header = JsonReader({text.data() + 8, text.size() - 8}).read();
        const Json* metadata = header.find("__metadata__");
        for (size_t i = 0; i < header.keys.size(); ++i) {
            const std::string& tensor = header.keys[i];
            if (tensor == "__metadata__") continue;
            named(tensor, [&] {
                Stored stored = place(header.items[i], size - 8 - length);
                stored.file = file;
                stored.begin += 8 + length;
                const Json* checksum = metadata == nullptr ? nullptr : metadata->find("crc32:" + tensor);
                if (checksum != nullptr) stored.checksum = *checksum;
                if (!tensors_.emplace(tensor, stored).second) fail("in two files");
            });
        }
    }

    // The range of a tensor in the data of a file.
    static Stored place(const Json& entry, uint64_t size) {
        Stored stored;
        stored.dtype = member(entry, "dtype", Json::String).text;
        stored.shape = integers(entry, "shape", INT64_MAX);
        const std::vector<int64_t> offsets = integers(entry, "data_offsets", INT64_MAX);
        if (offsets.size() != 2 || offsets[0] > offsets[1] || static_cast<uint64_t>(offsets[1]) > size)
            fail("data_offsets must be a range within the file");
        stored.begin = static_cast<uint64_t>(offsets[0]);
        stored.bytes = static_cast<uint64_t>(offsets[1] - offsets[0]);
        for (const Dtype& dtype : kDtypes)
            if (dtype.in_file == stored.dtype && byte_count(stored.shape, dtype.bytes) != stored.bytes)
                fail("data_offsets: not as long as the shape says");
        return stored;
    }

    fs::path folder_;
    Json section_, ties_, files_;
    std::map<std::string, Stored> tensors_;
};

// Bytes as elements of a dtype.
inline tilesparse::Array array(const Bytes& bytes, tilesparse::Dtype dtype) {
    return {static_cast<const void*>(bytes.data()), bytes.size() / tilesparse::size_of(dtype), dtype};
}
inline tilesparse::Array array(Bytes& bytes, tilesparse::Dtype dtype) {
    return {static_cast<void*>(bytes.data()), bytes.size() / tilesparse::size_of(dtype), dtype};
}

// One layer: y = x W^T + bias, with as many elements of each kind as its pattern and storage take.
struct Layer {
    tilesparse::Pattern pattern;
    tilesparse::Dtype dtype, values_dtype;
    Bytes values, bias;                   // no bias: empty
    std::vector<uint32_t> metadata = {};  // of 2:4, otherwise empty
    std::vector<float> scales = {};       // of 8 and 4 bits, otherwise empty
};

// Reads one layer: its pattern, then its values in whatever storage they have.
class LayerReader {
  public:
    LayerReader(const Checkpoint& checkpoint, const std::string& name)
        : checkpoint_(checkpoint),
          prefix_(name.empty() ? "" : name + "."),
          entry_(checkpoint.layer(name)),
          dtype_(dtype_of(member(entry_, "dtype", Json::String).text)) {}

    Layer read() const {
        const std::string& storage = member(entry_, "storage", Json::String).text;
        const bool is_plain = storage == "plain";
        const bool is_quantized = !is_plain && storage != "compressed";
        const Dtype& values_dtype = is_quantized ? dtype_of(storage, "storage") : dtype_;
        if (is_quantized && values_dtype.code < TS_INT8) fail("storage: " + storage + " is not known here");
        if (dtype_.code < TS_FLOAT64 || dtype_.code > TS_BFLOAT16) fail("dtype must be one of activations");

        Layer layer{read_pattern(),
                    static_cast<tilesparse::Dtype>(dtype_.code),
                    static_cast<tilesparse::Dtype>(values_dtype.code),
                    {},
                    {}};
        const int64_t nnz = layer.pattern.nnz();
        const auto [bn, bk] = layer.pattern.block_shape();
        const bool is_2_4 = has_nm();
        const bool is_halved = (is_2_4 && !is_plain) || values_dtype.code == TS_INT4;
        layer.values = read("weight", values_dtype, {nnz, bn, is_halved ? bk / 2 : bk});
        if (checkpoint_.has(prefix_ + "bias"))
            layer.bias = read("bias", dtype_, {layer.pattern.shape().out_features});
        if (is_2_4 && is_plain)
            compress(layer, read("mask", dtype_of("bool"), {nnz, bn, bk}));
        else if (is_2_4)
            layer.metadata = numbers<uint32_t>(read("metadata", dtype_of("int32"), {nnz, bk / 32, bn}));
        if (is_quantized) {
            const bool is_of_rows = member(entry_, "scales", Json::String).text == "row";
            layer.scales =
                numbers<float>(read("scales", dtype_of("float32"),
                                    is_of_rows ? std::vector<int64_t>{nnz, bn} : std::vector<int64_t>{nnz}));
        }
        return layer;
    }

  private:
    Bytes read(const char* name, const Dtype& dtype, const std::vector<int64_t>& shape) const {
        return checkpoint_.read(prefix_ + name, dtype, shape);
    }

    template <class T>
    static std::vector<T> numbers(const Bytes& bytes) {
        std::vector<T> numbers(bytes.size() / sizeof(T));
        if (!bytes.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
        return numbers;
    }

    tilesparse::Pattern read_pattern() const {
        const auto [out_features, in_features] = two_integers(entry_, "shape");
        const auto [bn, bk] = two_integers(entry_, "block_shape");
        const int64_t nnz = integer(member(entry_, "nnz", Json::Number), INT32_MAX);
        if (bn == 0) fail("block_shape must have sides from 16 to 128");
        const Dtype& int32 = dtype_of("int32");
        return tilesparse::Pattern({out_features, in_features},
                                   {static_cast<int32_t>(bn), static_cast<int32_t>(bk)},
                                   numbers<int32_t>(read("crow_indices", int32, {out_features / bn + 1})),
                                   numbers<int32_t>(read("col_indices", int32, {nnz})),
                                   numbers<int32_t>(read("slot", int32, {nnz})));
    }

    bool has_nm() const {
        const Json* nm = entry_.find("nm");
        if (nm == nullptr || nm->kind == Json::Null) return false;
        if (two_integers(entry_, "nm") != std::pair<int64_t, int64_t>(2, 4))
            fail("nm must be [2, 4] or null");
        return true;
    }

    // Plain weights keep all four of 2:4; the mask says which two count.
    static void compress(Layer& layer, const Bytes& mask) {
        Bytes kept(layer.values.size() / 2);
        layer.metadata.resize(mask.size() / 32);
        tilesparse::compress(layer.pattern, array(layer.values, layer.dtype),
                             {reinterpret_cast<const uint8_t*>(mask.data()), mask.size()},
                             array(kept, layer.dtype), layer.metadata);
        layer.values = std::move(kept);
    }

    const Checkpoint& checkpoint_;
    std::string prefix_;
    const Json& entry_;
    const Dtype& dtype_;
};

// Throws where the checkpoint does not have the layer, or not as it says.
inline Layer read_layer(const Checkpoint& checkpoint, const std::string& name) {
    return LayerReader(checkpoint, name).read();
}
