#include "engine/hyper_text.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <exception>
#include <stdexcept>

namespace zeroth {
namespace {

using Json = nlohmann::ordered_json;

double number_at(const Json& json, const char* name) {
  const auto said = json.at(name).get<std::string>();
  std::size_t read = 0;
  const double value = std::stod(said, &read);
  if (read != said.size()) throw std::invalid_argument(said);
  return value;
}

[[noreturn]] void refuse(const char* what, const std::string& where, const std::exception& error) {
  throw Error(ErrorCode::kCheckpoint, what, {.where = "engine.load", .which = where, .got = error.what()});
}

}  // namespace

std::string text_of(const GroupHyper& hyper) {
  const Json json{{"lr", hex_float(hyper.lr)},
                  {"beta1", hex_float(hyper.beta1)},
                  {"beta2", hex_float(hyper.beta2)},
                  {"eps", hex_float(hyper.eps)},
                  {"weight_decay", hex_float(hyper.weight_decay)},
                  {"momentum", hex_float(hyper.momentum)},
                  {"dampening", hex_float(hyper.dampening)},
                  {"nesterov", hyper.nesterov}};
  return json.dump();
}

GroupHyper hyper_of(const std::string& text, const std::string& where) {
  try {
    const Json json = Json::parse(text);
    const auto number = [&json](const char* name) { return number_at(json, name); };
    return {.lr = number("lr"),
            .beta1 = number("beta1"),
            .beta2 = number("beta2"),
            .eps = number("eps"),
            .weight_decay = number("weight_decay"),
            .momentum = number("momentum"),
            .dampening = number("dampening"),
            .nesterov = json.at("nesterov").get<bool>()};
  } catch (const std::exception& error) {
    refuse("hyper-parameters of a checkpoint cannot be read", where, error);
  }
}

std::string text_of(const LossScaler::State& state) {
  const Json json{{"scale", hex_float(state.scale)},
                  {"steps", state.steps},
                  {"last_overflow", state.last_overflow},
                  {"hysteresis", state.hysteresis}};
  return json.dump();
}

LossScaler::State scaler_state_of(const std::string& text, const std::string& where) {
  try {
    const Json json = Json::parse(text);
    return {.scale = number_at(json, "scale"),
            .steps = json.at("steps").get<std::int64_t>(),
            .last_overflow = json.at("last_overflow").get<std::int64_t>(),
            .hysteresis = json.at("hysteresis").get<int>()};
  } catch (const std::exception& error) {
    refuse("the loss scale of a checkpoint cannot be read", where, error);
  }
}

}  // namespace zeroth
