// node shoot.mjs PAGE WIDTH HEIGHT PICTURE: takes a picture of a page of render.py in headless Chromium, without network.
import { chromium } from 'playwright-core';

const [page, width, height, picture] = process.argv.slice(2);
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM,
  args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--disable-background-networking', '--disable-sync'],
});
const tab = await browser.newPage({ viewport: { width: Number(width), height: Number(height) } });
const problems = [];
tab.on('pageerror', (error) => problems.push(error.stack ?? String(error)));
await tab.route(/^https?:/, (route) => route.abort());
await tab.goto(`file://${page}`);
await tab.waitForFunction(() => document.querySelectorAll('#board section').length > 0, null, { timeout: 30000 });
await tab.waitForTimeout(1500); // until the tables have measured their texts
await tab.screenshot({ path: picture });
await browser.close();
if (problems.length) {
  console.error(problems.join('\n'));
  process.exit(1);
}
