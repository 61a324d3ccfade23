// Runs one step of a driver: `node DRIVER.mjs BASE_URL MODEL STEP`.

export const QUESTION = "Hey, quick check: is everything up and running?";
export const DESCRIPTION = "Returns the current health status of the LLM runtime.";
export const STATUS = "All systems are up.";

export async function run(steps) {
  const [baseUrl, model, name] = process.argv.slice(2);
  const shown = await steps[name](`${baseUrl}/v1`, model);
  console.log(JSON.stringify({ step: name, shown: String(shown).slice(0, 200) }));
}

export function check(condition, ...shown) {
  if (!condition) throw new Error(`not as expected: ${JSON.stringify(shown)}`);
}
